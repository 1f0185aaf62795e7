"""How many elements of two gradients have the same direction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from traindiff.directions.signs import Signs


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Elements whose directions agree, of all: whole numbers, so that limits are applied exactly.

    Attributes:
        same: How many agree.
        count: How many there are.
    """

    same: int
    count: int

    @property
    def share(self) -> float | None:
        """The similarity: the share that agrees; None of no elements."""
        return self.same / self.count if self.count else None


def total(found: Iterable[Agreement | None]) -> Agreement:
    """The similarity of several tensors together, weighted by their elements."""
    known = [one for one in found if one is not None]
    return Agreement(same=sum(one.same for one in known), count=sum(one.count for one in known))


def agreement(baseline: Signs, candidate: Signs) -> Agreement:
    """Compare element by element: positive, negative and zero agree with their like, NaN with nothing.

    Where one run does not know which elements are zero, zero and negative are one direction in both.

    Args:
        baseline: Signs of the baseline's gradient.
        candidate: Of the candidate's, as many.
    """
    same = baseline.positive == candidate.positive
    if baseline.zero is not None and candidate.zero is not None:
        same &= baseline.zero == candidate.zero
    same &= ~(baseline.nan | candidate.nan)
    return Agreement(same=int(np.count_nonzero(same)), count=baseline.size)


def plain_agreement(baseline: Signs, candidate: Signs) -> Agreement:
    """The convention of msprobe: positive or not; NaN and zero are as good as negative."""
    return Agreement(same=int(np.count_nonzero(baseline.positive == candidate.positive)), count=baseline.size)
