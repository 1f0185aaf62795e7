"""Gradients of which rounding leaves nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import SiteKey
from traindiff.core.summary import UNIT_ROUNDOFF, norm

_PHASES = ("backward", "grad")


def lost_in_rounding(pairs: Sequence[Pair]) -> Collection[SiteKey]:
    """The gradients of a step that are smaller, in both runs, than a float32 rounding of the largest one beside it.

    What is mathematically zero comes out like that, e.g. the gradient of a router whose weights are divided by their
    sum, if each row goes to one expert. Two correct runs have nothing in common there.

    Args:
        pairs: All pairs of the step.
    """
    sizes = {
        pair.baseline.key: max(float(norm(entry.summary)) for entry in (pair.baseline, pair.candidate))
        for pair in pairs
        if pair.baseline.key.phase in _PHASES and not (pair.baseline.unobserved or pair.candidate.unobserved)
    }
    most = {phase: max((size for key, size in sizes.items() if key.phase == phase), default=0.0) for phase in _PHASES}
    return frozenset(key for key, size in sizes.items() if 0.0 < size <= UNIT_ROUNDOFF["float32"] * most[key.phase])
