"""One call of a module, as long as somebody may ask for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from traindiff.core.site import printable
from traindiff.core.torch_compat.execution import version_of
from traindiff.observe.torch.hooks.nested import replaced, tensors
from traindiff.observe.torch.nonfinite.frames import Frame

_DEEPEST = 16


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One call of a module.

    Attributes:
        path: Canonical path of the module.
        module: What was called.
        parent: The call in which it was called; None for the root's.
        behind: Path of the module that had returned last before it was called; None where none had.
        frame: What is printed of it.
        arguments: Positional and named arguments, while it runs.
        outputs: What it has returned, by slot, until it has been looked at.
        random_state: Of the CPU's generator when it began, while it runs.
        held_back: Inputs whose -inf may be a mask; whether they are is seen by what the module makes of them.
        takers: Calls that took its outputs, by slot.
        passed_on: The outermost call that returned its output as it is, by slot, where one did.
        backward: What is printed of its backward pass.
        recipe: Its arguments as long as their tensors live.
    """

    path: str
    module: nn.Module
    parent: Call | None
    behind: str | None
    frame: Frame
    arguments: tuple[Sequence[Any], Mapping[str, Any]] | None = None
    outputs: Mapping[str, Any] = field(default_factory=dict)
    random_state: Tensor | None = None
    held_back: list[str] = field(default_factory=list)
    takers: dict[str, list[tuple[Call, str]]] = field(default_factory=dict)
    passed_on: dict[str, Call] = field(default_factory=dict)
    backward: Frame | None = None
    recipe: Recipe | None = None

    @property
    def kind(self) -> str:
        """Class of the module."""
        return printable(type(self.module).__name__)

    def finished(self, *, trained: bool, keeps_inputs: bool) -> None:
        """Let go of the arguments, as far as its backward pass does not need them."""
        if trained and self.arguments is not None:
            self.recipe = Recipe(*self.arguments, keeps=keeps_inputs)
        self.arguments = self.random_state = None
        self.outputs = {}


class Recipe:
    """Arguments of a call, by default without keeping a tensor alive.

    Args:
        args: Positional ones.
        kwargs: The others.
        keeps: Keep their tensors, until `let_go`.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, keeps: bool) -> None:
        found = [one for _, one in tensors((list(args), dict(kwargs)), "")]
        places = {id(one): torch.empty(0) for one in found}
        self._arguments = replaced(list(args), places), replaced(dict(kwargs), places)
        self._tensors = [(places[id(one)], ref(one), version_of(one)) for one in found]
        self._kept = found if keeps else []

    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
        """The arguments; None where a tensor is gone, or was written to."""
        found: dict[int, Tensor] = {}
        for place, reference, version in self._tensors:
            tensor = reference()
            if tensor is None or version_of(tensor) != version:
                return None
            found[id(place)] = tensor
        args, kwargs = self._arguments
        return replaced(args, found), replaced(kwargs, found)

    def let_go(self) -> None:
        """Keep no tensor any longer."""
        self._kept = []


def slots(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a module is given, by slot: `input[0]`, `input[1].mask`, `input.mask`; also what is no tensor."""
    for number, one in enumerate(args):
        yield from within(one, f"input[{number}]")
    for name, one in kwargs.items():
        yield from within(one, f"input.{name}")


def within(value: Any, slot: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """A value, or what is in it, by slot; a tensor that is all of it has the slot itself.

    Args:
        value: Anything; lists and tuples may hold themselves.
        slot: Its slot.
        depth: In how many lists and tuples it is. The 16th is not looked into.
    """
    if value is None or isinstance(value, Tensor):
        yield slot, value
    elif type(value) in (tuple, list) and depth < _DEEPEST:
        for number, entry in enumerate(value):
            yield from within(entry, f"{slot}[{number}]", depth + 1)
    else:
        yield from [(f"{slot}{name}", one) for name, one in tensors(value, "")] or [(slot, value)]
