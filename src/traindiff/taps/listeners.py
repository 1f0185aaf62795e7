"""Listen to functions for which there is no hook: they are replaced while at least one listener is attached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

Listener = TypeVar("Listener")


class Listeners(Generic[Listener]):
    """Those who listen to some functions, and what these functions were.

    Iterating gives the listeners that are attached when it begins.

    Args:
        install: Calls `replace` for each function. Called when the first listener is attached.
    """

    def __init__(self, install: Callable[[], None]) -> None:
        self._install = install
        self._attached: list[Listener] = []
        self._replaced: list[tuple[Any, str, Any]] = []

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
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)

    def _remove(self, listener: Listener) -> None:
        if listener not in self._attached:
            return
        self._attached.remove(listener)
        while self._replaced and not self._attached:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)
