"""Which rank differs, from a few sums over ranks: what a compact recording keeps in place of each rank's numbers.

Code j of a site is the sum of the sketches of all ranks whose number has bit j set, with its 64 buckets added up to 4.
Sketches are linear. So if only one rank differs between two runs, each code differs by all of the difference or by
nothing, and these bits are the number of the rank. If several ranks differ, some code differs by a part of it, and
nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.merge.placed_parts import RankPart

WIDTH = 4
"""Numbers of a code. A difference vanishes in all of them by chance only, and then nothing is said."""

MOST_BITS = 16
"""A sketch has room for the codes of 2 to the power of 16 ranks."""

_TERM = 0x9E3779B97F4A7C15

Codes = NDArray[np.float64]
"""Shape [bits, WIDTH]."""


def num_bits(world_size: int) -> int:
    """Number of codes for so many ranks; 0 if there is no room for them."""
    bits = max(1, (world_size - 1).bit_length())
    return bits if bits <= MOST_BITS else 0


def codes_of(parts: Sequence[RankPart], bits: int) -> Codes:
    """The codes of a site, from all its parts.

    Args:
        parts: Their numbers are known.
        bits: See `num_bits`.
    """
    sketches = np.array([part.summary["sketch"] for part in parts]).reshape(len(parts), -1, WIDTH).sum(axis=1)
    ranks = np.array([part.rank for part in parts])
    chosen = (ranks[None, :] >> np.arange(bits)[:, None]) & 1
    with np.errstate(over="ignore", invalid="ignore"):  # moments that overflowed float64
        return np.asarray(chosen.astype(np.float64) @ sketches)


def terms_of(parts: Sequence[RankPart]) -> int:
    """A hash of the bits of all parts, in their order."""
    bits = np.array([part.summary["fingerprint"] for part in parts], dtype=np.uint64)
    weights = (np.arange(len(parts), dtype=np.uint64) * np.uint64(2) + np.uint64(1)) * np.uint64(_TERM)
    mixed = (bits ^ (bits >> np.uint64(29))) * weights
    return int((mixed ^ (mixed >> np.uint64(32))).sum(dtype=np.uint64))


def differing_rank(difference: NDArray[np.float64], codes: Codes, *, clear: float) -> int | None:
    """The one rank that differs between two runs; None if several may.

    Args:
        difference: The sketch of the candidate minus that of the baseline.
        codes: The codes of the candidate minus those of the baseline.
        clear: Part of the difference that counts as nothing.
    """
    whole = difference.reshape(-1, WIDTH).sum(axis=0)
    size = float(np.linalg.norm(whole))
    if not np.isfinite(size) or not np.isfinite(codes).all() or size <= clear * float(np.linalg.norm(difference)):
        return None
    left, gone = np.linalg.norm(codes - whole, axis=1), np.linalg.norm(codes, axis=1)
    if not (np.minimum(left, gone) <= clear * size).all():
        return None
    return int(sum(1 << bit for bit in np.flatnonzero(left < gone).tolist()))
