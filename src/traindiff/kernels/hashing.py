"""The pseudo-random weights behind fingerprint and sketch, in NumPy. FORMAT.md is normative.

Every function takes and returns uint64 arrays and wraps modulo 2^64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

BLOCK = 64
"""Consecutive global indices that share one hash: a block; the place in it is the lane."""

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
WEIGHT_SEED = 0x243F6A8885A308D3  # pi, hexadecimal digits 1 to 16
SIGN_SEED = 0x13198A2E03707344  # pi, hexadecimal digits 17 to 32
XOR_32 = 0x85EBCA6B
ODD_32 = 0x9E3779B1


def splitmix64(value: Any) -> U64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection that mixes all 64 bits."""
    with np.errstate(over="ignore"):
        z = np.asarray(value, dtype=np.uint64) + np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
        return np.asarray(z ^ (z >> np.uint64(31)))


LANE_WEIGHTS: U64 = (splitmix64(np.arange(1, BLOCK + 1)) >> np.uint64(32)) | np.uint64(0x80000001)
"""64 odd numbers in [2^31, 2^32). A product with 32 bits of data never overflows 64."""


def block_weights(block: Any) -> U64:
    """Odd 64-bit weight of each block of the fingerprint; its top 6 bits rotate the sketch."""
    return np.asarray(splitmix64(np.asarray(block, dtype=np.uint64) ^ np.uint64(WEIGHT_SEED)) | np.uint64(1))


def block_signs(block: Any) -> U64:
    """64 sign bits per block: bit `lane` set means that the element enters the sketch negated."""
    return splitmix64(np.asarray(block, dtype=np.uint64) ^ np.uint64(SIGN_SEED))


def multiset_hash(bits: Any, *, wide: bool) -> U64:
    """Hash of each element's bits alone, to be summed.

    Args:
        bits: Raw bits, zero-extended to 64; folded by `fold` where `wide`.
        wide: Whether the elements have 64 bits.
    """
    bits = np.asarray(bits, dtype=np.uint64)
    with np.errstate(over="ignore"):
        if wide:
            z = bits * np.uint64(MIX_1)
            return np.asarray((z ^ (z >> np.uint64(32))) * np.uint64(MIX_2))
        v = (bits * np.uint64(ODD_32)) & np.uint64(0xFFFFFFFF)
        v = v ^ (v >> np.uint64(16))
        return np.asarray((bits ^ np.uint64(XOR_32)) * v)


def fold(bits: U64) -> U64:
    """`bits ^ (bits >> 32)`: a bijection that gives round 64-bit numbers low bits that differ.

    Without it the bits of 1.0 and 2.0 in float64 differ by 2^52 only, and a difference of weights
    divisible by 2^12, one in 4,096, would hide that they had changed places.
    """
    return np.asarray(bits ^ (bits >> np.uint64(32)))
