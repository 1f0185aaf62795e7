"""Device code: the pseudo-random weights of `traindiff.kernels.hashing`, in uint64."""

from __future__ import annotations

import triton
import triton.language as tl

from traindiff.kernels import hashing

_GOLDEN = tl.constexpr(hashing.GOLDEN)
_MIX_1 = tl.constexpr(hashing.MIX_1)
_MIX_2 = tl.constexpr(hashing.MIX_2)
_WEIGHT_SEED = tl.constexpr(hashing.WEIGHT_SEED)
_SIGN_SEED = tl.constexpr(hashing.SIGN_SEED)
_XOR_32 = tl.constexpr(hashing.XOR_32)
_ODD_32 = tl.constexpr(hashing.ODD_32)


@triton.jit
def splitmix64(z):
    """The finaliser of SplitMix64, uint64 to uint64."""
    z = z + _GOLDEN
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def block_weights(block):
    """Weight of each block (int64) of the fingerprint; its top 6 bits rotate the sketch."""
    return splitmix64(block.to(tl.uint64) ^ _WEIGHT_SEED) | 1


@triton.jit
def block_signs(block):
    """64 sign bits per block (int64)."""
    return splitmix64(block.to(tl.uint64) ^ _SIGN_SEED)


@triton.jit
def fold(word, bits: tl.constexpr):
    """The bits that enter the hashes, as uint64."""
    folded = word.to(tl.uint64)
    if bits == 64:
        folded = folded ^ (folded >> 32)
    return folded


@triton.jit
def multiset_hash(word, bits: tl.constexpr):
    """Hash of each element's bits alone, uint64; 0 for 0."""
    if bits == 64:
        z = fold(word, bits) * _MIX_1
        mixed = (z ^ (z >> 32)) * _MIX_2
    else:
        v = word * _ODD_32
        v = v ^ (v >> 16)
        mixed = (word ^ _XOR_32).to(tl.uint64) * v.to(tl.uint64)
    return mixed
