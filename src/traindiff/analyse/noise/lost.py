"""Gradients of which rounding leaves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import SiteKey
from traindiff.core.summary import UNIT_ROUNDOFF, nonfinite_count, norm

_PHASES = ("backward", "grad")

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
    sizes = {
        pair.baseline.key: (float(norm(pair.baseline.summary)), float(norm(pair.candidate.summary)))
        for pair in pairs
        if pair.baseline.key.phase in _PHASES and not (pair.baseline.unobserved or pair.candidate.unobserved)
    }
    broken = {pair.baseline.key for pair in pairs if pair.baseline.key in sizes and _is_broken(pair)}
    most = {
        phase: max((max(size) for key, size in sizes.items() if key.phase == phase), default=0.0) for phase in _PHASES
    }
    return {
        key: _ABOVE_ESTIMATES * sum(size) / size[0]
        for key, size in sizes.items()
        if key not in broken and size[0] and max(size) <= UNIT_ROUNDOFF["float32"] * most[key.phase]
    }


def _is_broken(pair: Pair) -> bool:
    """True if a tensor holds NaN or infinities, of which norms know nothing."""
    return any(nonfinite_count(entry.summary) for entry in (pair.baseline, pair.candidate))
