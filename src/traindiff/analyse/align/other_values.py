"""How the values of two different batches differ, as far as summaries tell."""

from __future__ import annotations

import math

from traindiff.analyse.findings import factor_text
from traindiff.analyse.merge.distance import Pair, best_fit, difference
from traindiff.core.summary import UNIT_ROUNDOFF, nonfinite_count

_LEFT_OVER = 1e-3
"""A batch is a multiple of another one if this part of it remains at most: the sketch of one tensor is linear."""


def values_text(pair: Pair, *, permuted: bool) -> str:
    """A sentence about the values of two batches of one shape and dtype; empty if nothing is known beside that.

    Args:
        pair: Both sides.
        permuted: Whether they hold the same values in another order.
    """
    if permuted:
        return " The values are the same, in another order."
    baseline, candidate = pair.baseline, pair.candidate
    if baseline.shape != candidate.shape or baseline.dtype != candidate.dtype or baseline.dtype not in UNIT_ROUNDOFF:
        return ""
    broken = [int(nonfinite_count(one.summary)) for one in (baseline, candidate)]
    if broken[0] != broken[1]:
        return f" NaN and infinities: {broken[1]} of its elements, {broken[0]} of the baseline's."
    size = difference(pair)
    if size is None or not math.isfinite(size) or not size:
        return ""
    factor, left_over = best_fit(baseline, candidate)
    if factor and left_over <= _LEFT_OVER and abs(factor - 1.0) > 10.0 * left_over:
        return f" It is {factor_text(factor)} x the baseline's."
    return f" It differs by {size:.2g} of the baseline's size (relative L2)."
