"""How far apart the two sides of a pair are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from traindiff.merging.step_table import Entry
from traindiff.rounding import UNIT_ROUNDOFF
from traindiff.summary import distance, norm, scale


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


def difference(pair: Pair) -> float | None:
    """Relative L2 difference, `||candidate - baseline|| / ||baseline||`, from the sketches.

    Returns:
        0 for equal bits; inf where shapes or non-finite elements differ, or only the baseline is
        all zero; None for whole numbers that differ, which have no distance.
    """
    baseline, candidate = pair.baseline, pair.candidate
    if equal_bits(pair):
        return 0.0
    if baseline.dtype not in UNIT_ROUNDOFF or candidate.dtype not in UNIT_ROUNDOFF:
        return None
    if baseline.shape != candidate.shape or int(baseline.summary["nan"]) != int(candidate.summary["nan"]):
        return math.inf
    if baseline.exact and candidate.exact and baseline.summary["nonfinite"] != candidate.summary["nonfinite"]:
        return math.inf
    apart, size = float(distance(baseline.summary, candidate.summary)), float(norm(baseline.summary))
    if not math.isfinite(apart):  # moments that overflowed float64
        return math.inf
    return apart / size if size else math.inf if apart else 0.0


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
    """The s that minimises `||candidate - s * baseline||`, and what that leaves of the candidate."""
    b, c = baseline.summary["sketch"], candidate.summary["sketch"]
    power = float(b @ b)
    if power == 0.0:
        return 0.0, 1.0
    s = float(b @ c) / power
    size = float(np.sqrt(c @ c))
    return s, float(np.sqrt(np.square(c - s * b).sum())) / size if size else 0.0
