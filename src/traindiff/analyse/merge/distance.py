"""How far apart the two sides of a pair are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from traindiff.analyse.merge.step_table import Entry
from traindiff.core.summary import UNIT_ROUNDOFF, distance, norm, scale

ESTIMATED_NORMS = 1.0
"""How far two norms that are estimated from sketches, those of updates, may be apart and say nothing: more than five
standard deviations of the ratio (log2: sqrt(2) * 0.126)."""


def equal_bits(pair: Pair) -> bool:
    """Whether both sides are known to hold the same bits."""
    baseline, candidate = pair.baseline, pair.candidate
    return bool(
        baseline.exact
        and candidate.exact
        and baseline.dtype == candidate.dtype
        and baseline.shape == candidate.shape
        and baseline.factor == candidate.factor
        and baseline.summary["fingerprint"] == candidate.summary["fingerprint"]
    )


def is_transposed(pair: Pair) -> bool:
    """Whether both sides have the same axes in another order, of a parameter or of what belongs to one."""
    baseline, candidate = pair.baseline, pair.candidate
    return (
        baseline.key.phase in ("grad", "optimizer", "update", "param")
        and baseline.shape != candidate.shape
        and sorted(baseline.shape) == sorted(candidate.shape)
    )


def difference(pair: Pair) -> float | None:
    """Relative L2 difference, `||candidate - baseline|| / ||baseline||`, from the sketches.

    Of a parameter that one run holds transposed, sketches cannot be subtracted: there it is that of the norms, which
    do not depend on the order of the elements.

    Returns:
        0 for equal bits; inf where shapes or non-finite elements differ, or only the baseline is
        all zero; None for whole numbers that differ, which have no distance.
    """
    baseline, candidate = pair.baseline, pair.candidate
    if equal_bits(pair):
        return 0.0
    if baseline.dtype not in UNIT_ROUNDOFF or candidate.dtype not in UNIT_ROUNDOFF:
        return None
    if is_transposed(pair) and int(baseline.summary["nan"]) == int(candidate.summary["nan"]):
        return _norms_apart(pair)
    if baseline.shape != candidate.shape or int(baseline.summary["nan"]) != int(candidate.summary["nan"]):
        return math.inf
    if baseline.exact and candidate.exact and baseline.summary["nonfinite"] != candidate.summary["nonfinite"]:
        return math.inf
    apart, size = float(distance(baseline.summary, candidate.summary)), float(norm(baseline.summary))
    if not math.isfinite(apart):  # moments that overflowed float64
        return math.inf
    return apart / size if size else math.inf if apart else 0.0


def _norms_apart(pair: Pair) -> float:
    baseline, candidate = float(norm(pair.baseline.summary)), float(norm(pair.candidate.summary))
    if not math.isfinite(baseline) or not math.isfinite(candidate):
        return math.inf
    apart = abs(candidate - baseline) / baseline if baseline else math.inf if candidate else 0.0
    estimated = not (pair.baseline.exact and pair.candidate.exact)
    return 0.0 if estimated and apart <= ESTIMATED_NORMS else apart


def rescaled(pair: Pair, factor: float) -> Pair:
    """The pair with the baseline multiplied by a factor; its bits are then no longer known."""
    summary = scale(pair.baseline.summary, abs(factor))
    if factor < 0:
        summary["sum"], summary["sketch"] = -summary["sum"], -summary["sketch"]
    return Pair(baseline=replace(pair.baseline, summary=summary, exact=False), candidate=pair.candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One site in both runs."""

    baseline: Entry
    candidate: Entry


def best_fit(baseline: Entry, candidate: Entry) -> tuple[float, float]:
    """The s that minimizes `||candidate - s * baseline||`, and what that leaves of the candidate."""
    b, c = baseline.summary["sketch"], candidate.summary["sketch"]
    power = float(b @ b)
    if power == 0.0:
        return 0.0, 1.0
    s = float(b @ c) / power
    size = float(np.sqrt(c @ c))
    return s, float(np.sqrt(np.square(c - s * b).sum())) / size if size else 0.0
