"""Modules that taps follow by hooks, which are attached again if the training removes them or replaces modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from inspect import getattr_static
from operator import contains, getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from traindiff.core.torch_compat.training import (
    EVERY_STEP_PRE_HOOKS,
    FORWARD_HOOKS,
    FORWARD_PRE_HOOKS,
    GRADIENT_HOOKS,
    STEP_POST_HOOKS,
    STEP_PRE_HOOKS,
)


def takes_hooks(module: nn.Module) -> bool:
    """True if hooks on the module are called; TorchScript calls none."""
    return not isinstance(module, torch.jit.ScriptModule)


def has_forward(module: nn.Module) -> bool:
    """True if a module can be called at all; a `ModuleList` cannot."""
    # Static: TorchScript computes the attribute, and cannot for a class.
    return getattr_static(type(module), "forward") is not nn.Module.forward


class HeldHooks:
    """The hooks of one tap on one module, optimizer or tensor; `undo` holds what else ends with them.

    `remove` leaves no hook, even if the training has copied the dict in which torch keeps them.
    """

    def __init__(self) -> None:
        self.undo = ExitStack()
        self._held: list[tuple[Any, str, int, Any]] = []  # owner, attribute with the hooks, key there, hook

    def before_forward(self, module: nn.Module, hook: Callable[..., Any], **options: Any) -> None:
        """Have `hook` called before each forward pass of a module, with torch's `options`."""
        self._hold(module, FORWARD_PRE_HOOKS, module.register_forward_pre_hook(hook, **options), hook)

    def after_forward(self, module: nn.Module, hook: Callable[..., Any], **options: Any) -> None:
        """Have `hook` called after each forward pass of a module, with torch's `options`."""
        self._hold(module, FORWARD_HOOKS, module.register_forward_hook(hook, **options), hook)

    def before_step(self, optimizer: Optimizer, hook: Callable[..., Any]) -> None:
        """Have `hook` called before each step of an optimizer."""
        self._hold(optimizer, STEP_PRE_HOOKS, optimizer.register_step_pre_hook(hook), hook)

    def after_step(self, optimizer: Optimizer, hook: Callable[..., Any]) -> None:
        """Have `hook` called after each step of an optimizer."""
        self._hold(optimizer, STEP_POST_HOOKS, optimizer.register_step_post_hook(hook), hook)

    def before_every_step(self, hook: Callable[..., Any]) -> None:
        """Have `hook` called before each step of every optimizer."""
        handle = optimizers.register_optimizer_step_pre_hook(hook)
        self._hold(optimizers, EVERY_STEP_PRE_HOOKS, handle, hook)

    def on_gradient(self, tensor: Tensor, hook: Callable[..., Any]) -> None:
        """Have `hook` called with each gradient of a tensor."""
        self._hold(tensor, GRADIENT_HOOKS, tensor.register_hook(hook), hook)

    def are_there(self) -> bool:
        """True if torch still calls all of them."""
        for owner, attribute, key, hook in self._held:
            hooks = getattr(owner, attribute, None)
            if hooks is None or hooks.get(key) is not hook:
                return False
        return True

    def put_last(self) -> None:
        """Have torch call them behind all others that are there."""
        for owner, attribute, key, _ in self._held:
            hooks = getattr(owner, attribute)
            if next(reversed(hooks)) != key:
                hooks[key] = hooks.pop(key)

    @property
    def places(self) -> list[tuple[dict[str, Any], str, int]]:
        """The place of each hook: attributes of its owner, name of the attribute with the hooks, and key in it."""
        return [(vars(owner), attribute, key) for owner, attribute, key, _ in self._held]

    def remove(self) -> None:
        """Remove them."""
        held, self._held = self._held, []
        with self.undo:
            for owner, attribute, key, hook in reversed(held):
                hooks = getattr(owner, attribute, None)
                if hooks is not None and hooks.get(key) is hook:
                    del hooks[key]

    def _hold(self, owner: Any, attribute: str, handle: Any, hook: Callable[..., Any]) -> None:
        self.undo.callback(handle.remove)
        self._held.append((owner, attribute, handle.id, hook))


REMOVED = "the training removed hooks of traindiff, which attached them again"
"""Why calls were not observed: the hooks were gone."""

TAKES_NO_HOOKS = "the training removed hooks of traindiff, and put a dict in place of torch's that takes none"
"""Why calls are not observed: the hooks cannot be attached again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """How a tap follows modules.

    Attributes:
        hook: Attaches hooks, given the module's canonical path, the module, and the `HeldHooks` that keep them.
        lost: Called with the path of a module whose hooks were gone, and with the reason why calls of it were not
            seen. The reason is empty if only code outside all forward passes can have called it since.
        calls_follow: The training loop calls these modules: their hooks tell where the training is.
        grows: Follow modules that the model gets later, too.
    """

    hook: Callable[[str, nn.Module, HeldHooks], None]
    lost: Callable[[str, str], None]
    calls_follow: bool = False
    grows: bool = False


@dataclass(slots=True, kw_only=True)
class _Place:
    path: str
    module: nn.Module
    how: Following
    hooks: HeldHooks = field(default_factory=HeldHooks)
    takes_hooks: bool = True

    def attach(self, module: nn.Module) -> None:
        self.hooks.remove()
        self.module = module
        try:
            self.how.hook(self.path, module, self.hooks)
        except TypeError:  # torch cannot keep hooks in what the training has put in the place of its dict of them
            self.takes_hooks = False
            self.hooks.remove()
        else:
            self.takes_hooks = True

    @property
    def is_attached(self) -> bool:
        return self.takes_hooks and self.hooks.are_there()


@dataclass(slots=True)
class FollowedModules:
    """Every module that a tap follows by hooks."""

    _places: list[_Place] = field(default_factory=list)
    _growing: list[Following] = field(default_factory=list)
    _looked_at: dict[bool, tuple[Sequence[dict[str, Any]], Sequence[str], Sequence[int]]] = field(default_factory=dict)

    def follow(self, modules: Iterable[tuple[str, nn.Module]], how: Following) -> ExitStack:
        """Follow some modules, given by path. Close the result to end it."""
        with ExitStack() as undo:
            undo.callback(self._end, how)
            if how.grows:
                self._growing.append(how)
            for path, module in modules:
                self._add(path, module, how)
            return undo.pop_all()

    def look(self, *, called: bool, everywhere: bool) -> None:
        """Attach hooks again that are gone.

        Args:
            called: True if modules may have been called since the last look.
            everywhere: Look at all modules, not only at those that the loop calls.
        """
        if self._are_there(everywhere=everywhere):
            return
        gone = [one for one in self._places if (everywhere or one.how.calls_follow) and not one.is_attached]
        for place in gone:
            place.attach(place.module)
            place.how.lost(place.path, (REMOVED if called else "") if place.takes_hooks else TAKES_NO_HOOKS)
        self._looked_at.clear()

    def _are_there(self, *, everywhere: bool) -> bool:
        """True if all keys of hooks are where they were. It is quick: there may be thousands of modules."""
        looked_at = self._looked_at.get(everywhere)
        if looked_at is None:
            places = [one for one in self._places if everywhere or one.how.calls_follow]
            if not all(one.is_attached for one in places):
                return False
            found = [where for one in places for where in one.hooks.places]
            looked_at = self._looked_at[everywhere] = (
                [attributes for attributes, _, _ in found], [name for _, name, _ in found], [key for *_, key in found]
            )  # fmt: skip
        owners, names, keys = looked_at
        try:
            return all(map(contains, map(getitem, owners, names), keys))
        except (KeyError, TypeError):  # the dict of hooks is gone
            return False

    def is_intact(self, module: nn.Module) -> bool:
        """True if all hooks on a module are there."""
        return all(one.is_attached for one in self._places if one.module is module)

    def replace(self, path: str, module: nn.Module) -> None:
        """Follow another module, which has taken the place of the one with this path."""
        for place in self._places:
            if place.path == path:
                place.attach(module)
        self._looked_at.clear()

    def grow(self, path: str, module: nn.Module) -> None:
        """Follow a module with a path that the model did not have before."""
        for how in self._growing:
            self._add(path, module, how)

    def forget(self, modules: Iterable[nn.Module]) -> None:
        """Follow some modules no more."""
        ids = {id(one) for one in modules}
        for place in self._places:
            if id(place.module) in ids:
                place.hooks.remove()
        self._places = [one for one in self._places if id(one.module) not in ids]
        self._looked_at.clear()

    def _add(self, path: str, module: nn.Module, how: Following) -> None:
        place = _Place(path=path, module=module, how=how)
        self._looked_at.clear()
        self._places.append(place)  # so that what is attached is removed, also where attaching fails
        how.hook(path, module, place.hooks)

    def _end(self, how: Following) -> None:
        with ExitStack() as undo:
            for place in self._places:
                if place.how is how:
                    undo.callback(place.hooks.remove)
        self._places = [one for one in self._places if one.how is not how]
        self._looked_at.clear()
        self._growing = [one for one in self._growing if one is not how]
