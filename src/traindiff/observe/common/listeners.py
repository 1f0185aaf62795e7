"""Listen to functions for which there is no hook: they are replaced while at least one listener is attached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from inspect import getattr_static
from typing import Any, Generic, TypeVar

Listener = TypeVar("Listener")

INHERITED = object()
"""Stands for an attribute that a class inherits."""


class Listeners(Generic[Listener]):
    """The listeners to some functions, and the original functions.

    If other code has replaced our function, and calls it, all stays as it is, and our function calls no listener.

    Iterating gives the listeners that are attached when it begins.

    Args:
        install: Calls `replace` for each function. Called when the first listener is attached.
    """

    def __init__(self, install: Callable[[], None]) -> None:
        self._install = install
        self._attached: list[Listener] = []
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __iter__(self) -> Iterator[Listener]:
        return iter(self._attached.copy())

    def __len__(self) -> int:
        return len(self._attached)

    def attach(self, listener: Listener) -> ExitStack:
        """Add a listener.

        Returns:
            Close it to remove the listener; with the last one, every function is put back.
        """
        self._attached.append(listener)
        if len(self._attached) == 1:
            self._install()
        undo = ExitStack()
        undo.callback(self._remove, listener)
        return undo

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Put a function in place of an attribute of a module or class, until the last listener is removed."""
        if not any(one is owner and attribute == name for one, attribute, *_ in self._replaced):
            original = vars(owner).get(name, INHERITED)
            self._replaced.append((owner, name, original, function))
            setattr(owner, name, function)

    def _remove(self, listener: Listener) -> None:
        if listener not in self._attached:
            return
        self._attached.remove(listener)
        if not self._attached:
            self._replaced = [one for one in reversed(self._replaced) if not put_back(*one)][::-1]


def put_back(owner: Any, name: str, original: Any, function: Callable[..., Any]) -> bool:
    """Undo a replacement, unless it was itself replaced; returns True if it is undone.

    Args:
        owner: The module, class or object whose attribute was replaced.
        name: Name of the attribute.
        original: What was there, or `INHERITED`.
        function: The replacement.
    """
    if getattr_static(owner, name, None) is not function:
        return False
    if original is INHERITED:
        delattr(owner, name)
    else:
        setattr(owner, name, original)
    return True
