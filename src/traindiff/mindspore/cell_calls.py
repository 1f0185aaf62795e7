"""Follow calls of cells that Python makes.

MindSpore's own hooks on cells are compiled together with the cell, where a training is: one that Python cannot be
compiled from ends the training. So `Cell.__call__`, which compiled code does not go through, is what is replaced here,
while there is somebody who listens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any

from mindspore import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """What is told of the calls of one cell. None of the functions may raise.

    Attributes:
        before: Called with the arguments, by position and by name.
        after: Called with what the cell has returned.
        failed: Called instead where it has raised.
    """

    before: Callable[[tuple[Any, ...], dict[str, Any]], None]
    after: Callable[[Any], None]
    failed: Callable[[], None]


_listeners: dict[int, list[Listener]] = {}
_original: list[Callable[..., Any]] = []
"""`Cell.__call__` as MindSpore has it, while it is replaced."""


def listen(listeners: Mapping[nn.Cell, Listener]) -> ExitStack:
    """Follow the calls of these cells, which the caller keeps alive. Close the result to end it."""
    with ExitStack() as undo:
        for cell, listener in listeners.items():
            undo.callback(_forget, id(cell), listener)
            _listeners.setdefault(id(cell), []).append(listener)
        if _listeners and not _original:
            _replace()
        return undo.pop_all()


def _forget(cell: int, listener: Listener) -> None:
    there = _listeners.get(cell, [])
    if listener in there:
        there.remove(listener)
    if not there:
        _listeners.pop(cell, None)
    if not _listeners and _original:
        nn.Cell.__call__ = _original.pop()


def _replace() -> None:
    original = nn.Cell.__call__
    _original.append(original)

    @wraps(original)
    def call(cell: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        listeners = tuple(_listeners.get(id(cell), ()))
        for listener in listeners:
            listener.before(args, kwargs)
        try:
            output = original(cell, *args, **kwargs)
        except BaseException:
            for listener in reversed(listeners):
                listener.failed()
            raise
        for listener in reversed(listeners):
            listener.after(output)
        return output

    nn.Cell.__call__ = call
