"""Hooks that stay behind when their module is copied or saved as a whole, as if they had never been there."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from functools import wraps
from typing import Any

from torch import nn
from torch.optim import Optimizer

from traindiff.taps.listeners import Listeners

NUMBER = "_traindiff_number"
"""What observed modules and optimizers carry; see `traindiff.taps.compiled`."""

_NESTED = 3
"""How deep the attributes of a module may lie in what its class gives for pickling: `(make, (attributes,))`."""


class LeftBehind:
    """A hook that does nothing in a copy of its module, such as a moving average, and in a file of it.

    While a session is attached, modules and optimizers are copied and pickled without it; see `leave_hooks_behind`.
    Where their class copies or pickles its attributes by itself, Python's own functions stand for it: also that file
    is loaded without traindiff.
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


def leave_hooks_behind() -> ExitStack:
    """Have modules and optimizers copied and pickled as if no session were attached to them.

    Hooks lie in dicts that are attributes of them, and `torch.save` pickles attributes. What it would write for a hook
    names functions that `torch.load` refuses unless it is told to trust the file.

    Close the result to leave it as it was.
    """
    return _sessions.attach(None)


def _replace_reduce() -> None:
    for kind in (nn.Module, Optimizer):
        _sessions.replace(kind, "__reduce_ex__", _without_hooks(kind.__reduce_ex__))


def _without_hooks(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807  it takes the place of that method
        reduced = original(self, protocol)
        if sys._getframe(1).f_code is copy.copy.__code__:
            return reduced  # a shallow copy has the very same dicts
        attributes = vars(self)
        hooked = {id(value): _cleared(value) for value in _dicts_with_hooks(attributes.values())}
        if not hooked and NUMBER not in attributes:
            return reduced
        ours = {key for value in _dicts_with_hooks(attributes.values()) for key in _keys_of_ours(value)}
        for name, value in attributes.items():  # which hooks take keyword arguments, are always called, ...
            if "_hooks_" in name and isinstance(value, dict) and not ours.isdisjoint(value):
                hooked[id(value)] = _with_others(value, ours)
        return _replaced(reduced, hooked, _NESTED)

    return __reduce_ex__


def _dicts_with_hooks(values: Iterable[Any]) -> list[dict[Any, Any]]:
    return [value for value in values if isinstance(value, dict) and _keys_of_ours(value)]


def _keys_of_ours(hooks: Mapping[Any, Any]) -> list[Any]:
    return [key for key, hook in hooks.items() if isinstance(hook, LeftBehind)]


def _cleared(hooks: dict[Any, Any]) -> dict[Any, Any]:
    return _with_others(hooks, _keys_of_ours(hooks))


def _with_others(entries: dict[Any, Any], ours: Iterable[Any]) -> dict[Any, Any]:
    """The same kind of dict without some entries."""
    kept = copy.copy(entries)
    for key in ours:
        kept.pop(key, None)
    return kept


def _replaced(value: Any, by_id: Mapping[int, Any], depth: int) -> Any:
    """A value with other dicts in the place of some, in the tuples and dicts that hold them."""
    if id(value) in by_id:
        return by_id[id(value)]
    if not depth:
        return value
    if type(value) is tuple:
        return tuple(_replaced(one, by_id, depth - 1) for one in value)
    if type(value) is dict and (NUMBER in value or any(id(one) in by_id for one in value.values())):
        return {key: by_id.get(id(one), one) for key, one in value.items() if key != NUMBER}
    return value


_sessions: Listeners[None] = Listeners(_replace_reduce)
