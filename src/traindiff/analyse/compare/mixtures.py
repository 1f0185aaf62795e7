"""Gradients that are sums of this step's and the step's before, up to the factors that clipping leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import SiteKey
from traindiff.core.summary import finite_count

REMAINDER = 0.01
"""Part of a gradient that a sum of two others may leave: more than rounding, less than another gradient."""

DISTINCT = 5.0
"""A sum explains a gradient if it leaves this many times less than either of its terms alone.

The step before may be a small part of it: clipping has made it small. A wrong gradient leaves almost as much with a
second term as without it. Gradients of successive steps may be almost parallel, e.g. with one batch for all steps; then
nothing tells them apart.
"""

FEW = 16
"""With fewer elements, two free factors explain too much; such tensors are held against the factors of the others."""

AGREEING = 0.6
"""Share of the gradients that must be the same mixture; others may be wrong in another way as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """`own` times the baseline's gradient of this step plus `before` times that of the step before."""

    own: float
    before: float

    def left_over(self, baseline: Any, previous: Any, candidate: Any) -> float:
        """What it leaves of a candidate's gradient, relative to that; inf if it does not explain it."""
        size = float(np.linalg.norm(candidate["sketch"]))
        added = self.before * previous["sketch"]
        rest = float(np.linalg.norm(candidate["sketch"] - self.own * baseline["sketch"] - added))
        explains = rest <= REMAINDER * size and DISTINCT * rest <= float(np.linalg.norm(added))
        return rest / size if size and explains else math.inf


def common_mixture(pairs: Sequence[Pair], previous: Mapping[SiteKey, Any]) -> Mixture | None:
    """The mixture that most gradients of one call of an optimizer are; None if they are none.

    Gradients that were not set to zero are such a mixture: clipping multiplies the baseline's by one factor, and the
    candidate's sum by another.

    Args:
        pairs: The gradients.
        previous: The baseline's summaries of the step before.
    """
    rows = [
        (pair.baseline.summary, previous[pair.baseline.key], pair.candidate.summary)
        for pair in pairs
        if pair.baseline.key in previous and pair.baseline.shape == pair.candidate.shape
    ]
    large = [row for row in rows if int(finite_count(row[0])) >= FEW]
    found = _fitted(large)
    if found is None:
        return None
    agreeing = sum(math.isfinite(found.left_over(*row)) for row in large)
    return found if agreeing >= AGREEING * len(large) else None


def mixture(baseline: Any, previous: Any, candidate: Any) -> Mixture | None:
    """The mixture that one gradient is, by itself; None if it is none, or has too few elements to tell."""
    if int(finite_count(baseline)) < FEW:
        return None
    found = _fitted([(baseline, previous, candidate)])
    return found if found is not None and math.isfinite(found.left_over(baseline, previous, candidate)) else None


def _fitted(rows: Sequence[tuple[Any, Any, Any]]) -> Mixture | None:
    """The best mixture of all rows together, each with the same weight, if it needs both terms."""
    sizes = [float(np.linalg.norm(candidate["sketch"])) for _, _, candidate in rows]
    kept = [(row, size) for row, size in zip(rows, sizes, strict=True) if size and math.isfinite(size)]
    if not kept:
        return None
    own, before, target = (np.concatenate([row[place]["sketch"] / size for row, size in kept]) for place in range(3))
    if not (np.isfinite(own).all() and np.isfinite(before).all()):
        return None
    factors, *_ = np.linalg.lstsq(np.stack([own, before], axis=1), target, rcond=None)
    whole, left = float(np.linalg.norm(target)), float(np.linalg.norm(target - factors[0] * own - factors[1] * before))
    alone = min(_alone(own, target), _alone(before, target))
    if min(factors) <= 0.0 or left > REMAINDER * whole or alone < DISTINCT * left:
        return None
    return Mixture(own=float(factors[0]), before=float(factors[1]))


def _alone(term: NDArray[np.float64], target: NDArray[np.float64]) -> float:
    """What the best multiple of one term leaves of the target."""
    power = float(term @ term)
    return float(np.linalg.norm(target - (float(term @ target) / power if power else 0.0) * term))
