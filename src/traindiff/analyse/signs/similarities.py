"""Similarities of directions by parameter and step, and the rule that they should keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from traindiff.analyse.signs.run_signs import Signs


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


START_PERCENT = 97
"""Share of elements, in percent, that should agree in the first step. From the guide of msprobe's gradient monitor."""

DROP_PERCENT = 3
"""By how much the share may be less than in the step before, in percentage points. From the same guide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """One place at which the rule is broken.

    Attributes:
        step: In which step.
        parameter: Canonical path of the parameter; None for all of them together.
        similarity: The share there.
        before: The share in the step before; None in the first.
    """

    step: int
    parameter: str | None
    similarity: float
    before: float | None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "step": self.step, "parameter": self.parameter, "similarity": self.similarity, "before": self.before
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Similarities:
    """Shares of elements whose directions agree in two runs.

    Attributes:
        steps: Steps that were compared, ascending.
        parameters: By canonical path, in the baseline's order: one agreement per step, None where it has none.
        only: Parameters of the baseline only, and of the candidate only.
        unknown: By parameter: why signs that both runs have could not be compared.
        zeros_known: Whether both runs know which elements are zero; if not, zero counts as negative.
    """

    steps: tuple[int, ...]
    parameters: Mapping[str, tuple[Agreement | None, ...]]
    only: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    unknown: Mapping[str, str]
    zeros_known: bool = True

    @property
    def summary(self) -> tuple[Agreement, ...]:
        """All parameters together, weighted by their elements, one agreement per step."""
        return tuple(total(row[number] for row in self.parameters.values()) for number in range(len(self.steps)))

    @property
    def broken(self) -> tuple[BrokenRule, ...]:
        """Where the rule is broken: step by step, parameters in their order, all of them together last."""
        rows = [*((path, row) for path, row in self.parameters.items()), (None, self.summary)]
        found = [one for path, row in rows for one in _broken(path, self.steps, row)]
        return tuple(sorted(found, key=lambda one: one.step))

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "steps": list(self.steps),
            "summary": [one.share for one in self.summary],
            "parameters": {
                path: [None if one is None else one.share for one in row] for path, row in self.parameters.items()
            },
            "broken": [one.to_json() for one in self.broken],
            "only": [list(paths) for paths in self.only],
            "unknown": dict(self.unknown),
            "zeros_known": self.zeros_known,
        }


def _broken(path: str | None, steps: Sequence[int], row: Sequence[Agreement | None]) -> Iterator[BrokenRule]:
    """In the first step, below 0.97; in a later one, more than 0.03 below the last one before it that is known."""
    before: Agreement | None = None
    for step, one in zip(steps, row, strict=True):
        if one is None or not one.count:
            continue
        share = one.same / one.count
        if before is None:
            if 100 * one.same < START_PERCENT * one.count:
                yield BrokenRule(step=step, parameter=path, similarity=share, before=None)
        elif 100 * (before.same * one.count - one.same * before.count) > DROP_PERCENT * before.count * one.count:
            yield BrokenRule(step=step, parameter=path, similarity=share, before=before.share)
        before = one
