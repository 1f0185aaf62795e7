"""What the floor of a site is a multiple of, where replicas measure it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from traindiff.merging.distance import Pair
from traindiff.rounding import UNIT_ROUNDOFF
from traindiff.summary import finite_count

SAFETY = 2.0
"""How much further than its replicas a correct run may be.

With m replicas, a further correct run lies beyond all of them in one of m + 1 cases, but not far: of the legal
variations in benchmarks/FAULTS.md none exceeds the floor that this factor leaves.
"""

ALONE = 4.0
"""Constant of the floors where there is one replica only, so that none can be held out."""

FEW = 16
"""Tensors with fewer elements are too small for their noise to be measured by a few replicas."""


def basis(
    pair: Pair,
    distances: Sequence[float],
    storage: float = 0.0,
    terms: float = 1.0,
    rounded: float = 0.0,
    inside: float = 0.0,
) -> float:
    """What the floor of a site is a multiple of: rounding, or what replicas show, whichever is larger.

    The estimate from a few replicas scatters, the more the fewer elements there are: the relative spread of a norm
    of n independent errors is 1 / sqrt(2 n).

    Args:
        pair: Both sides.
        distances: Relative differences of replicas from the baseline.
        storage: For an update: norm of the parameter over norm of the update.
        terms: Rows that are summed over for each element of a gradient, or of what BatchNorm computes. A kernel
            that adds one after the other in float32 is off by sqrt(terms) u; replicas, which all run the baseline's
            kernels, do not show it. Measured with torch on the CPU: 30 u over 512 rows (gradients of BatchNorm,
            channels last; 4 u otherwise).
        rounded: Largest unit roundoff on the baseline's way to here: its noise is of this size already, whatever
            the dtype of the pair (float32 parameters under autocast).
        inside: Unit roundoff of the dtype that the operation may compute in, and these replicas do not show.
    """
    baseline, candidate = pair.baseline, pair.candidate
    units = [UNIT_ROUNDOFF.get(entry.dtype, 0.0) for entry in (baseline, candidate)]
    # Noise of a shorter dtype is larger.
    shorter = max(1.0, max(units) / max(units[0], rounded)) if units[0] and max(units) else 1.0
    summation = math.sqrt(terms) * min(max(units), UNIT_ROUNDOFF["float32"])
    quantum = max(max(units) * (1.0 + storage), summation, inside)
    spread = 1.0 + 4.0 / math.sqrt(max(1, int(finite_count(baseline.summary))))
    return spread * max(quantum, shorter * max(distances, default=0.0))
