"""Hooks that stay behind when their module is copied or saved as a whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class LeftBehind:
    """A hook that does nothing in a copy of its module, such as a moving average, and in a file of it.

    That file is loaded without traindiff: what stands there for the hook is Python's own.
    """

    __torch_unserializable__ = True  # torch need not warn when it saves a tensor without it

    def __deepcopy__(self, _: dict[int, Any]) -> _NoHook:
        return _NoHook()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")  # takes whatever it is given, and returns None


class _NoHook(LeftBehind):
    """One that compilers can trace through."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass
