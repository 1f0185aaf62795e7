"""Hide from the training's modes what traindiff computes itself.

A training may be inside a `TorchDispatchMode` or a `TorchFunctionMode`, which counts operators, keeps their results, or
changes what they do: selective checkpointing, `FlopCounterMode`, `FakeTensorMode`, `torch.set_default_device`. An
operator of a tap would be counted or kept with the others; in selective checkpointing that ends the training. So all
modes of the thread are off while a tap is at work. Taps that put modes of their own among them do it `in_sight`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from traindiff.core.torch_compat.modes import (
    leave_dispatch_mode,
    num_dispatch_modes,
    put_dispatch_modes,
    take_dispatch_modes,
    with_torch_function,
    without_torch_function,
)


class _Hidden(threading.local):
    """What is hidden on this thread.

    Attributes:
        modes: The modes that are off now, the outermost first; None if none were taken off.
        asked_by: Who has hidden them for a hook, after it found that the hook may run; None for others.
    """

    modes: list[Any] | None = None
    asked_by: object = None


hidden = _Hidden()


class out_of_sight:  # noqa: N801  a context like those of the standard library; a generator costs a microsecond more
    """Inside it, on this thread, no mode sees which operators are called.

    Args:
        functions: No mode sees which functions of torch are called, either. Then subclasses of tensors that override
            functions are not asked, and results are not of these classes: not for results that the training uses.
    """

    __slots__ = ("_functions", "_is_outermost", "_without")

    def __init__(self, *, functions: bool = True) -> None:
        self._functions = functions

    def __enter__(self) -> None:
        self._is_outermost = hidden.modes is None
        self._without = None
        if self._is_outermost:
            if self._functions:
                self._without = without_torch_function()
                self._without.__enter__()
            hidden.modes = take_dispatch_modes()

    def __exit__(self, *error: object) -> None:
        if self._is_outermost:
            modes, hidden.modes = hidden.modes, None
            put_dispatch_modes(modes or ())
            if self._without is not None:
                self._without.__exit__(None, None, None)


def called_out_of_sight(
    function: Callable[..., Any], *args: Any, functions: bool = True, asked_by: object = None
) -> Any:
    """What a function returns that is called in `out_of_sight`; quicker where no mode is on, as for most hooks.

    Args:
        function: The function.
        args: Its arguments.
        functions: See `out_of_sight`.
        asked_by: Noted in `hidden` if this is the outermost call.
    """
    if hidden.modes is not None:
        return function(*args)
    if not functions or num_dispatch_modes():
        with out_of_sight(functions=functions):
            return function(*args)
    with without_torch_function():
        hidden.modes, hidden.asked_by = [], asked_by
        try:
            return function(*args)
        finally:
            modes, hidden.modes, hidden.asked_by = hidden.modes, None, None
            if modes:  # the function has put one on
                put_dispatch_modes(modes)


@contextmanager
def in_sight() -> Iterator[None]:
    """Inside it, the modes of the training are on again: to change them, or to call the training's own code."""
    if hidden.modes is None:
        yield
        return
    modes, asked_by = hidden.modes, hidden.asked_by
    hidden.modes = hidden.asked_by = None
    put_dispatch_modes(modes)
    try:
        with with_torch_function():
            yield
    finally:
        hidden.modes, hidden.asked_by = take_dispatch_modes(), asked_by


def with_functions() -> AbstractContextManager[Any]:
    """Inside it, functions of torch obey the training's function modes again, e.g. its default device.

    This is for code of the training that a tap calls: dispatch modes, which count operators, still do not see it.
    """
    return nullcontext() if hidden.modes is None else with_torch_function()


def enter_mode(mode: Any) -> None:
    """Put a `TorchDispatchMode` of a tap above those of the training."""
    with in_sight():
        mode.__enter__()


def leave_mode(mode: Any) -> None:
    """Take a tap's mode off again, wherever it is among the others."""
    with in_sight():
        leave_dispatch_mode(mode)
