"""Gradients as the optimizer sees them, judged together: one factor may be common to all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from traindiff.comparison.alignment import Pair
from traindiff.comparison.diagnosis import best_fit
from traindiff.comparison.floors import Floors
from traindiff.comparison.step_table import Key
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
    fits = [best_fit(pair.baseline, pair.candidate)[0] for pair in pairs]
    limits = [floors[pair.baseline.key] for pair in pairs]
    factor = float(np.median(fits))
    # A factor that is common to all shows as clearly as in the least noisy of them.
    if factor == 0.0 or not math.isfinite(factor) or abs(factor - 1.0) <= min(limits):
        return None
    near = sum(abs(s / factor - 1.0) <= max(limit, 1e-6) for s, limit in zip(fits, limits, strict=True))
    return factor if near >= COMMON_SHARE * len(fits) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a module's bias adds up to its gradient: the gradient of the module's first output.

    Attributes:
        norm: Its norm.
        count: Its elements.
    """

    norm: float
    count: int


def terms_by_module(pairs: Iterable[Pair]) -> dict[str, Terms]:
    """Terms by path of the module."""
    return {
        pair.baseline.key.path: Terms(
            norm=float(norm(pair.baseline.summary)), count=int(pair.baseline.summary["count"])
        )
        for pair in pairs
        if pair.baseline.key.phase == "backward" and pair.baseline.key.slot == "output[0]"
    }


def gradient_floor(pair: Pair, terms: Mapping[str, Terms], floors: Floors) -> float:
    """Floor of a parameter's gradient; those with one axis (biases, norms) are sums over all rows."""
    left = pair.baseline
    added = terms.get(left.key.path.rpartition(".")[0])
    if len(left.shape) != 1 or added is None or not left.shape[0]:
        return floors.gradient(1.0)
    size = float(norm(left.summary))
    return floors.gradient(
        added.norm / size if size else 1.0, dtype=left.dtype, terms=max(1.0, added.count / left.shape[0])
    )
