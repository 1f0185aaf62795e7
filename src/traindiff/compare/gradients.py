"""Gradients as the optimizer sees them, judged together: one factor may be common to all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from traindiff.compare.alignment import Pair
from traindiff.compare.diagnosis import Case, best_fit
from traindiff.compare.step_table import Key
from traindiff.summary import norm

COMMON_SHARE = 0.6
"""Share of the gradients that must follow one factor for it to be the factor of all of them."""


def common_factor(pairs: Sequence[Pair], floors: Mapping[Key, float]) -> float | None:
    """The factor between the gradients of the two runs, if most of them share one that is not 1.

    Clipping to a norm multiplies all gradients by a factor that depends on each of them, so that one
    wrong gradient moves them all; and a loss that is scaled wrongly scales them all. Without
    taking the common factor out, the first gradient would be blamed for either.

    Args:
        pairs: The gradients of one call of an optimizer.
        floors: Floor of each, by the baseline's key.
    """
    if len(pairs) < 3:
        return None
    fits = [best_fit(Case(baseline=pair.baseline, candidate=pair.candidate))[0] for pair in pairs]
    limits = [floors[pair.baseline.key] for pair in pairs]
    factor = float(np.median(fits))
    if factor == 0.0 or not math.isfinite(factor) or abs(factor - 1.0) <= float(np.median(limits)):
        return None
    near = sum(abs(s / factor - 1.0) <= max(limit, 1e-6) for s, limit in zip(fits, limits, strict=True))
    return factor if near >= COMMON_SHARE * len(fits) else None


def terms_norms(pairs: Iterable[Pair]) -> dict[str, float]:
    """By path of a module: the norm of the gradient of its first output, which its bias sums up."""
    return {
        pair.baseline.key.path: float(norm(pair.baseline.summary))
        for pair in pairs
        if pair.baseline.key.phase == "backward" and pair.baseline.key.slot == "output[0]"
    }


def cancellation(pair: Pair, terms: Mapping[str, float]) -> float:
    """Norm of the terms of a bias's gradient over the norm of their sum; 1 for other parameters."""
    if len(pair.baseline.shape) != 1:
        return 1.0
    size = float(norm(pair.baseline.summary))
    return terms.get(pair.baseline.key.path.rpartition(".")[0], 0.0) / size if size else 1.0
