"""Steps in which two runs recorded the same bits: what is merged of one is that of the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from traindiff.storage import StepObservations

Merged = TypeVar("Merged")
"""What is made of a step."""


class SharedSteps(Generic[Merged]):
    """Hands what was merged of one run's step to the run that it is compared with, if their bits are the same.

    Numbers are compared as columns, all at once. What is said about them is compared once for each pair of layouts.
    """

    def __init__(self) -> None:
        self._latest: tuple[Sequence[StepObservations], Merged] | None = None
        self._alike: dict[int, tuple[object, object]] = {}  # by rank: the latest layouts that say the same

    def give(self, of_ranks: Sequence[StepObservations], merged: Merged) -> None:
        """Keep what was merged of a step, until `forget`."""
        self._latest = tuple(of_ranks), merged

    def take(self, of_ranks: Sequence[StepObservations]) -> Merged | None:
        """What was merged of the step that was given last, if this one is the same to the bit.

        Nothing is kept of it if this one has its number: no other one will be the same.
        """
        if self._latest is None or list(map(_place, self._latest[0])) != list(map(_place, of_ranks)):
            return None
        (given, merged), self._latest = self._latest, None
        return merged if self._are_same(given, of_ranks) else None

    def forget(self) -> None:
        """Drop what was given, so that no step stays in memory when the next one is read."""
        self._latest = None

    def _are_same(self, given: Sequence[StepObservations], of_ranks: Sequence[StepObservations]) -> bool:
        return all(map(_have_same_numbers, given, of_ranks)) and all(map(self._say_the_same, given, of_ranks))

    def _say_the_same(self, one: StepObservations, other: StepObservations) -> bool:
        """True if both runs say the same about the numbers of a rank."""
        layouts, known = (one.layout, other.layout), self._alike.get(one.rank)
        is_known = known is not None and all(
            own is held and own is not None for own, held in zip(layouts, known, strict=True)
        )
        if not is_known and one.observations != other.observations:
            return False
        self._alike[one.rank] = layouts
        return True


def _have_same_numbers(one: StepObservations, other: StepObservations) -> bool:
    held = one.summaries is other.summaries  # as a rule, of steps that are stored in the same bytes
    return held or np.array_equal(one.summaries.view(np.uint64), other.summaries.view(np.uint64))


def _place(step: StepObservations) -> tuple[int, str, int, int]:
    return step.rank, step.optimizer, step.step, len(step.observations)
