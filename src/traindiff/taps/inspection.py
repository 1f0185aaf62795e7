"""`traindiff.inspect`: observe an intermediate tensor that no module returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

T = TypeVar("T")

_observers: list[Callable[[str, object], None]] = []
_alterers: list[Callable[[str, Any], Any]] = []


def inspect(name: str, tensor: T) -> T:
    """Observe an intermediate tensor, forward and backward, in every recording that is running.

    Without a running recording this costs one test of an empty list. A name that is used several
    times in a step is numbered, never overwritten.

    Args:
        name: The site's path in the recording, e.g. `"attention.scores"`.
        tensor: Any tensor.

    Returns:
        `tensor` itself; in a recording that is a replica, `tensor` perturbed within rounding.
    """
    for alter in _alterers:
        if (altered := alter(name, tensor)) is not None:
            tensor = altered
    if _observers:
        _observe(name, tensor)
    return tensor


def _observe(name: str, tensor: object) -> None:
    from torch import Tensor
    from torch.compiler import is_compiling

    if is_compiling():
        from traindiff.taps.compiled import inspect_compiled

        if isinstance(tensor, Tensor):
            inspect_compiled(name, tensor)
        return
    for observe in _observers:
        observe(name, tensor)


def tap_inspection(observe: Callable[[str, object], None]) -> ExitStack:
    """Have `observe` called with every inspected tensor. Close the result to remove the tap."""
    _observers.append(observe)
    undo = ExitStack()
    undo.callback(_observers.remove, observe)
    return undo


def alter_inspected(alter: Callable[[str, Any], Any]) -> ExitStack:
    """Have `inspect` return what `alter` does, unless that is None. Close the result to end it."""
    _alterers.append(alter)
    undo = ExitStack()
    undo.callback(_alterers.remove, alter)
    return undo
