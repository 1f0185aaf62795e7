"""The modules that taps follow by hooks: they are looked at again, since a training may remove hooks and modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from traindiff.taps.held_hooks import HeldHooks

REMOVED = "the training removed hooks of traindiff, which attached them again"
"""Why something was not observed whose hooks were gone."""

TAKES_NO_HOOKS = "the training removed hooks of traindiff, and put a dict in place of torch's that takes none"
"""Why something is not observed whose hooks cannot be attached again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """How a tap follows modules.

    Attributes:
        hook: Attaches hooks to a module, given its canonical path, and what holds them.
        lost: Called with the path of a module whose hooks were gone, and with why calls of it were not seen; that is
            empty where nothing can have called it since, but what is outside all forward passes.
        calls_follow: Whether the loop calls these modules: their hooks tell where the training is.
        grows: Whether modules that the model has got since are followed, too.
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
    _looked_at: dict[bool, list[tuple[dict[str, Any], str, int]]] = field(default_factory=dict)

    def follow(self, modules: Mapping[str, nn.Module] | Iterable[tuple[str, nn.Module]], how: Following) -> ExitStack:
        """Follow some modules. Close the result to end it."""
        with ExitStack() as undo:
            undo.callback(self._end, how)
            if how.grows:
                self._growing.append(how)
            for path, module in modules.items() if isinstance(modules, Mapping) else modules:
                self._add(path, module, how)
            return undo.pop_all()

    def look(self, *, called: bool, everywhere: bool) -> bool:
        """Attach hooks again that are gone; gives whether any was.

        Args:
            called: Whether modules may have been called since they were looked at.
            everywhere: Whether all modules are looked at, or only those that the loop calls.
        """
        if self._are_there(everywhere=everywhere):
            return False
        gone = [one for one in self._places if (everywhere or one.how.calls_follow) and not one.is_attached]
        for place in gone:
            place.attach(place.module)
            place.how.lost(place.path, (REMOVED if called else "") if place.takes_hooks else TAKES_NO_HOOKS)
        self._looked_at.clear()
        return bool(gone)

    def _are_there(self, *, everywhere: bool) -> bool:
        """Whether all keys of hooks are where they were: quick, for thousands of modules in each step."""
        looked_at = self._looked_at.get(everywhere)
        if looked_at is None:
            places = [one for one in self._places if everywhere or one.how.calls_follow]
            if not all(one.is_attached for one in places):
                return False
            looked_at = self._looked_at[everywhere] = [where for one in places for where in one.hooks.places]
        try:
            return all(key in attributes[name] for attributes, name, key in looked_at)
        except (KeyError, TypeError):  # what torch keeps hooks in is gone
            return False

    def is_intact(self, module: nn.Module) -> bool:
        """Whether the hooks on a module are all there."""
        return all(one.is_attached for one in self._places if one.module is module)

    def replace(self, path: str, module: nn.Module) -> None:
        """Another module has taken the place of the one with this path."""
        for place in self._places:
            if place.path == path:
                place.attach(module)
        self._looked_at.clear()

    def grow(self, path: str, module: nn.Module) -> None:
        """The model has got a module with a path that it did not have."""
        for how in self._growing:
            self._add(path, module, how)

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
