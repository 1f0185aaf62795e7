"""Numbers of which rounding leaves little or nothing, and gradients that lack whole rows, which it does not explain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from traindiff.analyse.merge.distance import Pair, difference
from traindiff.analyse.merge.site import SiteKey
from traindiff.core.summary import SMALLEST_NORMAL, UNIT_ROUNDOFF, is_finite, norm_of, norms_of

FLOWING = ("backward", "grad")
"""Phases of gradients, of activations and of parameters."""

_ABOVE_ESTIMATES = 1.5
"""Differences are estimated from sketches, to about 9 % of their size."""


def lost_in_rounding(pairs: Sequence[Pair]) -> Mapping[SiteKey, float]:
    """Floors of gradients that are smaller, in both runs, than a float32 rounding of the largest one in the step.

    What is mathematically zero comes out like that, e.g. the gradient of a router whose weights are divided by their
    sum, if each row goes to one expert. Two correct runs have nothing in common there, so the floor is the largest
    difference that tensors of these sizes can have.

    Args:
        pairs: All pairs of the step.
    """
    flowing = [
        pair
        for pair in pairs
        if pair.baseline.key.phase in FLOWING and not (pair.baseline.unobserved or pair.candidate.unobserved)
    ]
    norms = [norms_of([getattr(pair, side).summary for pair in flowing]) for side in ("baseline", "candidate")]
    sizes = {pair.baseline.key: size for pair, size in zip(flowing, zip(*norms, strict=True), strict=True)}
    broken = {
        pair.baseline.key
        for pair in flowing
        if not (is_finite(pair.baseline.summary) and is_finite(pair.candidate.summary))
    }
    most = {
        phase: max((max(size) for key, size in sizes.items() if key.phase == phase), default=0.0) for phase in FLOWING
    }
    return {
        key: _ABOVE_ESTIMATES * sum(size) / size[0]
        for key, size in sizes.items()
        if key not in broken and size[0] and max(size) <= UNIT_ROUNDOFF["float32"] * most[key.phase]
    }


_STEPS_APART = 4.0
"""Distance of two elements below the smallest normal number that rounding explains, in steps between such numbers.
Measured in bfloat16 where second moments of Adam are such numbers, over 8 steps: at most 1.6 (root mean square)."""


def subnormal_error(pair: Pair) -> float:
    """Relative error of elements below the smallest normal number: they are rounded to multiples of the smallest one.

    Second moments are squares, and come there where gradients vanish.
    """
    before, after = pair.baseline.summary, pair.candidate.summary
    tiny = int(max(before["subnormal"], after["subnormal"])) + abs(int(before["zero"]) - int(after["zero"]))
    normal = max(SMALLEST_NORMAL.get(one.dtype, 0.0) for one in (pair.baseline, pair.candidate)) if tiny else 0.0
    if not normal:
        return 0.0
    step = 2.0 * max(UNIT_ROUNDOFF.get(one.dtype, 0.0) for one in (pair.baseline, pair.candidate)) * normal
    error, size = _STEPS_APART * step * math.sqrt(tiny), norm_of(before)
    if size:
        return error / size
    return math.inf if norm_of(after) <= error else 0.0


_SHORTEST_ROW = 8
"""Shorter rows may be zero by chance."""

_BESIDE = 0.25
"""Part of a row that may be zero by chance beside whole rows."""


def lost_rows(pairs: Sequence[Pair]) -> Mapping[SiteKey, float]:
    """Floors of gradients of which whole rows are zero in one run only: one rounding of their elements.

    Rounding makes no row exactly zero. A gate that rounding turns may: of ReLU, of a mask, of a saturated unit. Then
    other elements of activations, or of their gradients, are zero, too. So this is only told if none are.

    Args:
        pairs: All pairs of the step.
    """
    found = {}
    for pair in pairs:
        if pair.baseline.key[:2] == ("grad", "") and pair.baseline.key.slot == "grad" and num_lost_rows(pair):
            u, size = UNIT_ROUNDOFF.get(pair.baseline.dtype, 0.0), difference(pair)
            if size is not None and size > u:
                found[pair.baseline.key] = u
    flowing = (pair for pair in pairs if pair.baseline.key.phase in ("forward", "backward"))
    if found and any(len({int(one.summary["zero"]) for one in (p.baseline, p.candidate)}) > 1 for p in flowing):
        return {}
    return found


def num_lost_rows(pair: Pair) -> int:
    """Number of rows that are zero in one run, in a tensor in which the other run has no row of zeros; or 0."""
    baseline, candidate = pair.baseline, pair.candidate
    if len(baseline.shape) < 2 or baseline.shape != candidate.shape or not (baseline.exact and candidate.exact):
        return 0
    row = int(baseline.summary["count"]) // max(1, baseline.shape[0])
    fewer, more = sorted(int(one.summary["zero"]) for one in (baseline, candidate))
    if row < _SHORTEST_ROW or fewer > _BESIDE * row:
        return 0
    rows, beside = divmod(more - fewer, row)
    return rows if beside <= _BESIDE * row and rows < baseline.shape[0] else 0
