"""What a seeded fault is: its sentence, where it first shows, and how it is injected."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from traindiff.errors import ConfigError, Problem
from traindiff.run.demo.loop import TrainingLoop


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """`owner.name` is `value` inside the block, on this object only, and as it was after it.

    An attribute that the object has from its class, such as a method, is its class's again.
    """
    own = vars(owner)
    had, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def replaced_entry(owner: MutableMapping[str, Any], key: str, value: object) -> Iterator[None]:
    """`owner[key]` is `value` inside the block, and as it was after it."""
    before = owner[key]
    owner[key] = value
    try:
        yield
    finally:
        owner[key] = before


Injection = Callable[[TrainingLoop], AbstractContextManager[None]]
"""Enter it to break a training loop, leave it to have the loop as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSight:
    """Where a fault is first visible, in execution order, to whoever sees every bit.

    Attributes:
        step: In which step.
        phase: In which phase.
        path: Canonical path of the module or parameter; empty for the model's own inputs.
        slot: Which tensor of it.
        stage: Part of the phase, e.g. `micro` for a gradient before it is accumulated.
        missing: The faulty training has no such tensor at all.
    """

    step: int = 0
    phase: str
    path: str
    slot: str
    stage: str = ""
    missing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A known way in which trainings go wrong.

    Attributes:
        name: What the user asks for.
        message: What goes wrong, in one sentence.
        first_sight: Where it first shows.
        fewest_micro_batches: It needs at least so many micro-batches to happen.
        inject: Breaks a training loop for as long as the context lasts.
    """

    name: str
    message: str
    first_sight: FirstSight
    fewest_micro_batches: int
    inject: Injection

    def check(self, micro_batches: int) -> None:
        """Raise unless the fault can happen with so many micro-batches.

        Raises:
            ConfigError: It cannot.
        """
        if micro_batches < self.fewest_micro_batches:
            problem = Problem(
                where=f"micro_batches = {micro_batches}",
                what=f'is too few for the fault "{self.name}".',
                fix=f"Write at least {self.fewest_micro_batches}, and a number that divides the batch.",
            )
            raise ConfigError("the demo", [problem], consequence="nothing was trained")


def fault(
    name: str, *, first_sight: FirstSight, fewest_micro_batches: int = 1
) -> Callable[[Callable[[TrainingLoop], Iterator[None]]], Fault]:
    """Make a fault of a generator function that breaks a loop, yields, and repairs it.

    The first line of its docstring is the sentence that says what goes wrong.
    """

    def make(break_and_repair: Callable[[TrainingLoop], Iterator[None]]) -> Fault:
        message = (inspect.getdoc(break_and_repair) or "").partition("\n")[0]
        return Fault(
            name=name, message=message, first_sight=first_sight, fewest_micro_batches=fewest_micro_batches,
            inject=contextmanager(break_and_repair),
        )  # fmt: skip

    return make
