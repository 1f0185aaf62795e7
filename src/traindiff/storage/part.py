"""A part of a rank's stream: some of its steps, found without decoding what is before them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar


class _Step(Protocol):
    optimizer: str
    step: int


_StepType = TypeVar("_StepType", bound=_Step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Steps of a rank from one number to another.

    Attributes:
        begin: Number of the first step.
        end: Number of the last step; None for all that follow.
        before: Also the last step of each optimizer before `begin`: updates are differences to it.
        only: Name of the only optimizer that the rank has; empty if it has several, or if that is not known.
    """

    begin: int = 0
    end: int | None = None
    before: bool = False
    only: str = ""

    def of(self, steps: Iterable[_StepType]) -> Iterator[_StepType]:
        """Those of the steps, in the order of each optimizer. No other step is kept or waited for."""
        earlier: dict[str, _StepType] = {}
        for step in steps:
            if self.begin and step.step < self.begin:  # where all are read, a negative number is refused
                if self.before:
                    earlier[step.optimizer] = step
            elif self.end is not None and step.step > self.end:
                if self.only:
                    return
            else:
                if step.optimizer in earlier:
                    yield earlier.pop(step.optimizer)
                yield step
            del step


WHOLE = Part()
"""All steps."""


_GUESSES = 4
"""So many messages are guessed before the rest is halved: a message of many sites takes as long as ten of few."""


def first_message(step_of: Callable[[int], tuple[str, int] | None], count: int, part: Part) -> int:
    """Number of a message before which nothing belongs to `part`; 1, the first after the schema, if that is not known.

    Steps of one optimizer ascend, so a few messages tell where they are. The steps of several optimizers may be
    anywhere between each other.

    Args:
        step_of: The optimizer and the step of a message; None for the end of the stream and for one that is cut off.
        count: Number of messages, with the schema.
        part: The steps.
    """
    low, high = 1, count  # all before `low` are before the part, and none from `high` on
    number, tries = 1 + part.begin, _GUESSES  # of a run that recorded every step from 0 on
    while low < high:
        number = min(max(number, low), high - 1) if tries > 0 else (low + high) // 2
        found, tries = step_of(number), tries - 1
        if found is not None and found[0] != part.only:
            return 1
        if found is None:
            high = number
        elif found[1] >= part.begin:
            high, number = number, number - 1 if found[1] == part.begin else number * part.begin // found[1]
        else:
            low, number = number + 1, number + part.begin - found[1]
    if not part.before or low == 1:
        return low
    last = step_of(low - 1)
    while low > 1 and step_of(low - 1) == last:
        low -= 1
    return low
