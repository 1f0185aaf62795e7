"""One call of a module, as long as somebody may ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from traindiff.core.torch_compat.autograd import version_of
from traindiff.observe.torch.hooks.nested import replaced, tensors
from traindiff.observe.torch.nonfinite.frames import Frame

_DEEPEST = 16

Arguments = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and named arguments of a call."""


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One call of a module.

    Attributes:
        module: What was called.
        parent: The call in which it was called; None for the root's.
        behind: Path of the module that had returned last before it was called; None where none had.
        frame: What is printed of it.
        arguments: What the module is given, while it runs.
        outputs: What it has returned, by slot, until it has been looked at.
        random_state: Of the CPU's generator when it began, while it runs.
        held_back: Inputs whose -inf may be a mask; whether they are is seen by what the module makes of them.
        takers: Calls that took its outputs, by slot.
        passed_on: The outermost call that returned its output as it is, by slot, where one did.
        backward: What is printed of its backward pass.
        recall: Gives its arguments as long as their tensors live; see `without_keeping`. None without a backward pass.
    """

    module: nn.Module
    parent: Call | None
    behind: str | None
    frame: Frame
    arguments: Arguments | None = None
    outputs: Mapping[str, Any] = field(default_factory=dict)
    random_state: Tensor | None = None
    held_back: list[str] = field(default_factory=list)
    takers: dict[str, list[tuple[Call, str]]] = field(default_factory=dict)
    passed_on: dict[str, Call] = field(default_factory=dict)
    backward: Frame | None = None
    recall: Callable[[], Arguments | None] | None = None

    @property
    def path(self) -> str:
        """Canonical path of the module."""
        return self.frame.path

    @property
    def kind(self) -> str:
        """Class of the module."""
        return self.frame.kind

    def finished(self, *, trained: bool) -> None:
        """Let go of the arguments, as far as its backward pass does not need them."""
        if trained and self.arguments is not None:
            self.recall = without_keeping(*self.arguments)
        self.arguments = self.random_state = None
        self.outputs = {}


def without_keeping(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Arguments | None]:
    """Remember arguments without keeping a tensor alive.

    Returns:
        Gives the arguments; None where a tensor is gone, or was written to.
    """
    found = [one for _, one in tensors((list(args), dict(kwargs)), "")]
    places = {id(one): torch.empty(0) for one in found}
    remembered = replaced((list(args), dict(kwargs)), places)
    references = [(places[id(one)], ref(one), version_of(one)) for one in found]

    def recall() -> Arguments | None:
        alive: dict[int, Tensor] = {}
        for place, reference, version in references:
            tensor = reference()
            if tensor is None or version_of(tensor) != version:
                return None
            alive[id(place)] = tensor
        given: Arguments = replaced(remembered, alive)
        return given

    return recall


def slots(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The inputs of a module by slot: `input[0]`, `input[1].mask`, `input.mask`; not only tensors."""
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
