"""Hooks that stay behind when their module is copied, saved as a whole or scripted, as if they had never been there."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from operator import is_
from types import FrameType, FunctionType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from traindiff.core.torch_compat.compiling import script_compiler
from traindiff.core.torch_compat.training import FORWARD_HOOKS, FORWARD_PRE_HOOKS, modules_in
from traindiff.observe.common.listeners import Listeners

NUMBER = "_traindiff_number"
"""The attribute that observed modules and optimizers carry; see `traindiff.observe.torch.hooks.compiled`."""

_NESTED = 6
"""How deep a module's attributes may lie in what its class returns for pickling, e.g. `(make, (attributes,))`."""

_MOST_ENTRIES = 10_000
"""Lists and dicts with more entries are not searched for a module's attributes."""


def put_last(hooks: dict[int, Any], kind: type[InertOnCopy]) -> None:
    """Have torch call the hooks of a kind behind all others, in their order."""
    ours = [key for key, hook in hooks.items() if isinstance(hook, kind)]
    if 0 < len(ours) < len(hooks) and [*hooks][-len(ours) :] != ours:
        for key in ours:
            hooks[key] = hooks.pop(key)


class InertOnCopy:
    """A hook that does nothing in a copy of its module, such as a moving average, or in a file of it.

    While a session is attached, modules and optimizers are copied and pickled without it; see `leave_hooks_behind`.
    If a class copies or pickles its attributes by itself, a function of Python's takes the place of the hook, so that
    the file can be loaded without traindiff.
    """

    __slots__ = ()
    __torch_unserializable__ = True  # torch need not warn when it saves a tensor without it

    def __deepcopy__(self, _: dict[int, Any]) -> _NoHook:
        return _NoHook()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")  # accepts any arguments, and returns None


class _NoHook(InertOnCopy):
    """A hook that compilers can trace through."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


def is_first_hook(module: nn.Module) -> bool:
    """True if no other hook has changed what a module returned before hooks of this kind see it.

    These hooks are put in front of others when they are registered; others may be put in front of them later.
    """
    return all(isinstance(hook, InertOnCopy) for hook in [*getattr(module, FORWARD_HOOKS).values()][:1])


def has_hooks_of_others(module: nn.Module) -> bool:
    """True if a module has hooks on its forward pass that are not of this kind."""
    hooks = (vars(module).get(name) or {} for name in (FORWARD_HOOKS, FORWARD_PRE_HOOKS))
    return any(not isinstance(hook, InertOnCopy) for one in hooks for hook in one.values())


def leave_hooks_behind(things: Iterable[Any]) -> ExitStack:
    """Have modules and optimizers copied, pickled and scripted as if no session were attached to them.

    Hooks lie in dicts that are attributes, and `torch.save` pickles attributes: it would write names of functions that
    `torch.load` refuses unless it is told to trust the file.

    Close the result to end it.

    Args:
        things: The modules and optimizers that are observed; their classes may define these methods themselves.
    """
    with ExitStack() as undo:
        undo.enter_context(_sessions.attach(None))
        for kind in dict.fromkeys(one for thing in things for one in type(thing).__mro__):
            if issubclass(kind, (nn.Module, Optimizer)) and kind not in (nn.Module, Optimizer):
                _replace_methods(kind)
        return undo.pop_all()


def _install() -> None:
    for kind in (nn.Module, Optimizer):
        _sessions.replace(kind, "__reduce_ex__", _reduced_without_hooks(kind.__reduce_ex__))
    compiler = script_compiler()
    without_hooks = _scripted_without_hooks(compiler.create_script_module)
    _sessions.replace(compiler, "create_script_module", without_hooks)


def _replace_methods(kind: type) -> None:
    for name, without_hooks in (("__reduce_ex__", _reduced_without_hooks), ("__deepcopy__", _copied_without_hooks)):
        if isinstance(method := vars(kind).get(name), FunctionType):
            _sessions.replace(kind, name, without_hooks(method))


def _reduced_without_hooks(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807  it takes the place of that method
        reduced = original(self, protocol)
        if _is_shallow_copy(sys._getframe(1)):
            return reduced  # a shallow copy has the very same dicts
        attributes = vars(self)
        if NUMBER not in attributes and not any(map(_has_ours, attributes.values())):
            return reduced
        return _cleared(reduced, _NESTED)

    return __reduce_ex__


def _copied_without_hooks(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def __deepcopy__(self: Any, memo: Any) -> Any:  # noqa: N807  it takes the place of that method
        copied = original(self, memo)
        attributes = getattr(copied, "__dict__", None)
        if copied is not self and isinstance(attributes, dict):
            for name, value in _without_ours(attributes).items():
                if value is not attributes[name]:
                    attributes[name] = value
            attributes.pop(NUMBER, None)
        return copied

    return __deepcopy__


def _is_shallow_copy(frame: FrameType | None) -> bool:
    """True if `copy.copy` asks, and not through a method of the class."""
    while frame is not None and frame.f_code.co_name == "__reduce_ex__":
        frame = frame.f_back
    return frame is not None and frame.f_code is copy.copy.__code__


def _cleared(value: Any, depth: int) -> Any:
    """The result of `__reduce_ex__` without hooks in the attributes; the very same if it holds none."""
    kind = type(value)
    if not depth or kind not in (tuple, list, dict, OrderedDict) or len(value) > _MOST_ENTRIES:
        return value
    if kind in (tuple, list):
        entries = [_cleared(one, depth - 1) for one in value if not _is_number(one)]
        return value if len(entries) == len(value) and all(map(is_, entries, value)) else kind(entries)
    if NUMBER in value or any(map(_has_ours, value.values())):
        return _without_ours(value)
    if _has_ours(value):
        return _with_others(value, _keys_of_ours(value))
    found = {key: _cleared(one, depth - 1) for key, one in value.items()}
    return value if all(map(is_, found.values(), value.values())) else kind(found)


def _is_number(item: Any) -> bool:
    """True for the item of a module's attributes that has its number."""
    return type(item) is tuple and len(item) == 2 and type(item[0]) is str and item[0] == NUMBER


def _without_ours(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes without our hooks: in dicts of hooks, and in those that tell how hooks are called."""
    ours = {key for value in attributes.values() if isinstance(value, dict) for key in _keys_of_ours(value)}
    return {
        name: _with_others(value, ours) if _has_ours(value) or _is_about(value, name, ours) else value
        for name, value in attributes.items()
        if name != NUMBER
    }


def _is_about(value: Any, name: Any, hooks: AbstractSet[Any]) -> bool:
    """True if an attribute tells of some of these hooks how they are called."""
    return isinstance(value, dict) and "_hooks_" in str(name) and not hooks.isdisjoint(value)


def _has_ours(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(hook, InertOnCopy) for hook in value.values())


def _keys_of_ours(hooks: Mapping[Any, Any]) -> list[Any]:
    return [key for key, hook in hooks.items() if isinstance(hook, InertOnCopy)]


def _with_others(entries: dict[Any, Any], ours: Iterable[Any]) -> dict[Any, Any]:
    """A dict of the same kind without some entries."""
    kept = copy.copy(entries)
    for key in ours:
        kept.pop(key, None)
    return kept


def _scripted_without_hooks(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def create_script_module(nn_module: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as undo:
            for module in modules_in(nn_module) if isinstance(nn_module, nn.Module) else ():
                undo.enter_context(_as_it_was(module))
            return original(nn_module, *args, **kwargs)

    return create_script_module


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Inside it, a module has nothing that a session has put on it."""
    kept = {name: dict(getattr(module, name)) for name in (FORWARD_HOOKS, FORWARD_PRE_HOOKS)}
    number = vars(module).pop(NUMBER, None)
    for name, hooks in kept.items():
        for key, hook in hooks.items():
            if isinstance(hook, InertOnCopy):
                del getattr(module, name)[key]
    try:
        yield
    finally:
        for name, hooks in kept.items():
            getattr(module, name).clear()
            getattr(module, name).update(hooks)
        if number is not None:
            vars(module)[NUMBER] = number


_sessions: Listeners[None] = Listeners(_install)
