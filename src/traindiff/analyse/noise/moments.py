"""Noise floors of norms and sums: an error with a direction moves them, and independent rounding hardly does.

Recordings hold exact norms and sums. Rounding n elements independently in unit roundoff u changes each by about u, and
the norm only by u / sqrt(n). So an error of a small part of u that all elements share (a wrong eps, a wrong factor, a
lost term) stands out in the norm or in the sum, though the elements themselves differ by less than their rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from traindiff.analyse.merge.distance import Pair, norms_apart
from traindiff.analyse.merge.site import SiteKey
from traindiff.core.summary import UNIT_ROUNDOFF, norm_of

SCATTER = 2.5
"""How far rounding may move a norm or a sum, in units of `u / sqrt(n)` and for an L2 floor of u.

Measured in the first step of 9 trainings of benchmarks/zoo in bfloat16 or under autocast, over 21,749 sites of all
legal variations that keep the sites: none reaches half of the floor that this leaves. A factor of 1 + u / 2 on the
output of one module reaches 0.5 to 2 of it, of tensors with 2,048 to 8,704 elements; the more elements, the more.
"""

SHARED = 1.0 / 6.0
"""Part of a rounding that all elements of a row, or of a channel, may share.

A norm that rounds its means and variances to a short dtype makes such errors. They scatter the norm of a tensor as if
it had one element for each row, or channel.
"""

HANDED_ON = 4.0
"""Multiple of a change of norms or sums at the inputs that an operation may make of it."""

FEW = 64
"""Tensors with fewer elements are judged by their elements only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A norm or a sum that moved further than rounding moves it.

    Attributes:
        statistic: Which of both.
        apart: Change of the norm as a part of the norm, or of the sum as a part of sqrt(n) times the norm.
        floor: How large it may be.
        unit: How large independent rounding would make it.
    """

    statistic: Literal["norm", "sum"]
    apart: float
    floor: float
    unit: float


class MomentFloors:
    """Floors of the norms and sums of one step, fed with those seen so far in it.

    They hold while both runs compute with the same parameters: what a weight differs by is the same for all rows, so it
    has a direction. And they hold where tensors are rounded to 16 bits or fewer: kernels that add up in float32 leave
    errors with a direction, which are far below the unit of shorter dtypes and not below its own.

    Args:
        measured: How far replicas allow norm and sum of a site to move; 0 without replicas.
    """

    def __init__(self, measured: Callable[[SiteKey], float]) -> None:
        self._measured = measured
        self._unit = 0.0
        self._u = 0.0
        self._not_measured: list[Pair] = []  # pairs on the way to here whose own unit was not needed so far
        self._seen = 0.0

    def moved(self, pair: Pair, floor: float) -> Moved | None:
        """The norm or sum of a pair, if it moved further than it may.

        Args:
            pair: Both sides.
            floor: Floor of their relative L2 difference.
        """
        if (base := self._base(pair, floor)) is None:
            return None
        apart_in = moments_apart(pair)
        if max(apart_in.values()) <= self._limit(pair, floor, base, _least_unit(pair)):
            return None  # as most do: the least that they may move takes no sums over groups of elements
        limit = self._limit(pair, floor, base, self._largest_unit(pair))
        for statistic, apart in apart_in.items():
            if apart > limit:
                return Moved(statistic=statistic, apart=apart, floor=limit, unit=self._largest_unit(pair))
        return None

    def limit(self, pair: Pair, floor: float) -> float | None:
        """How far the norm or the sum of a pair may move, given the arguments of `moved`; None if that is unknown."""
        base = self._base(pair, floor)
        return None if base is None else self._limit(pair, floor, base, self._largest_unit(pair))

    def _limit(self, pair: Pair, floor: float, base: float, unit: float) -> float:
        """The limit if rounding moves a norm by so much on the way to here, and here."""
        return max(SCATTER * unit * max(1.0, floor / max(self._u, *_roundoffs(pair))) + HANDED_ON * self._seen, base)

    def _base(self, pair: Pair, floor: float) -> float | None:
        """What the limit of a pair is in any case; None if it is unknown."""
        key, u = pair.baseline.key, max(self._u, *_roundoffs(pair))
        of_a_parameter = (key.phase, key.stage, key.slot) == ("grad", "", "grad")
        if not (of_a_parameter or key.phase in ("forward", "backward", "loss")):
            return None
        if u <= UNIT_ROUNDOFF["float32"] or not _are_known(pair) or not floor < math.inf:
            return None
        if int(pair.baseline.summary["count"]) < FEW and key.phase != "loss":
            return None
        # In one dtype a constant (of dropout, of an attention's scale) is rounded; in the other it is not.
        constants = u if pair.baseline.dtype != pair.candidate.dtype else 0.0
        return max(self._measured(key), constants)

    def saw(self, pair: Pair, *, handed_on: bool = True) -> None:
        """Note a pair on the data's path; not `handed_on` if later sites do not compute with the candidate's."""
        self._not_measured.append(pair)
        self._u = max(self._u, *_roundoffs(pair))
        if handed_on and _are_known(pair):
            self._seen = max(self._seen, *moments_apart(pair).values())

    def _largest_unit(self, pair: Pair) -> float:
        """How far rounding moves a norm on the way to here, and here."""
        for one in self._not_measured:
            self._unit = max(self._unit, _unit(one))
        self._not_measured.clear()
        return max(self._unit, _unit(pair))


def _roundoffs(pair: Pair) -> tuple[float, float]:
    return UNIT_ROUNDOFF.get(pair.baseline.dtype, 0.0), UNIT_ROUNDOFF.get(pair.candidate.dtype, 0.0)


def _unit(pair: Pair) -> float:
    """How far rounding moves the norm of a tensor."""
    scatter = 1.0 / math.sqrt(max(1.0, alike(pair.baseline.summary)))
    return max(_roundoffs(pair)) * max(scatter, _shared(pair))


def _least_unit(pair: Pair) -> float:
    """A number that `_unit` is never below: no tensor is alike to more elements than it has."""
    scatter = (1.0 - 1e-9) / math.sqrt(max(1, int(pair.baseline.summary["count"])))
    return max(_roundoffs(pair)) * max(scatter, _shared(pair))


def _shared(pair: Pair) -> float:
    return SHARED / math.sqrt(_groups(pair.baseline.shape))


def _groups(shape: tuple[int, ...]) -> int:
    """Number of rows, or of channels if there are fewer: of [rows, features] or [batch, channels, ..., features]."""
    rows = max(1, math.prod(shape[:-1] if len(shape) > 1 else shape))
    return min(rows, shape[1]) if len(shape) > 2 and shape[1] > 1 else rows


def alike(summary: Any) -> float:
    """How many elements of equal size would scatter the norm as much: `(sum x^2)^2 / sum x^4`, at least.

    The largest element of each of 16 groups of rows, or of columns, bounds the sum of fourth powers in the group.
    """
    power = float(summary["sum_of_squares"])
    with np.errstate(invalid="ignore", over="ignore"):
        fourth = min(
            float(np.sum(np.square(summary[f"{axis}_largest"]) * summary[f"{axis}_squares"]))
            for axis in ("row", "column")
        )
    return power * power / fourth if fourth > 0.0 and math.isfinite(fourth) else 0.0


def moments_apart(pair: Pair) -> dict[Literal["norm", "sum"], float]:
    """How far norm and sum of a pair are apart, both in the units in which rounding n elements makes u / sqrt(n)."""
    baseline, candidate = pair.baseline.summary, pair.candidate.summary
    size, count = norm_of(baseline), max(1, int(baseline["count"]))
    moved = abs(float(candidate["sum"] - baseline["sum"])) / math.sqrt(count)
    return {"norm": norms_apart(pair), "sum": moved / size if size else math.inf if moved else 0.0}


def _are_known(pair: Pair) -> bool:
    """True if norms and sums are those of the tensors, of one shape, whose elements are all finite numbers."""
    return (
        pair.baseline.exact
        and pair.candidate.exact
        and pair.baseline.shape == pair.candidate.shape
        and norm_of(pair.baseline.summary) > 0.0
        and all(entry.dtype in UNIT_ROUNDOFF for entry in (pair.baseline, pair.candidate))
        and all(math.isfinite(float(entry.summary["sum"])) for entry in (pair.baseline, pair.candidate))
        and pair.baseline.summary["nonfinite"] == pair.candidate.summary["nonfinite"]
    )
