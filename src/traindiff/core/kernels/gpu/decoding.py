"""Device code: an element's bits, from memory to a number.

A *word* is the element's bits, zero-extended to uint32; uint64 for 64-bit dtypes. Everything that must
be exact (extremes, counts) is decided on integers, where no compiler flushes subnormals to zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from traindiff.core.kernels import reference as hashing

_GOLDEN = tl.constexpr(hashing.GOLDEN)
_MIX_1 = tl.constexpr(hashing.MIX_1)
_MIX_2 = tl.constexpr(hashing.MIX_2)
_WEIGHT_SEED = tl.constexpr(hashing.WEIGHT_SEED)
_SIGN_SEED = tl.constexpr(hashing.SIGN_SEED)
_XOR_32 = tl.constexpr(hashing.XOR_32)
_ODD_32 = tl.constexpr(hashing.ODD_32)


@triton.jit
def splitmix64(z):
    """The finalizer of SplitMix64, uint64 to uint64."""
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


@triton.jit
def load_words(address, offset, valid, bits: tl.constexpr):
    """Words of the elements at `offset` (in elements) from `address` (int64); 0 where not `valid`."""
    if bits == 8:
        word = tl.load(address.to(tl.pointer_type(tl.uint8)) + offset, mask=valid, other=0).to(tl.uint32)
    elif bits == 16:
        word = tl.load(address.to(tl.pointer_type(tl.uint16)) + offset, mask=valid, other=0).to(tl.uint32)
    elif bits == 32:
        word = tl.load(address.to(tl.pointer_type(tl.uint32)) + offset, mask=valid, other=0)
    else:
        word = tl.load(address.to(tl.pointer_type(tl.uint64)) + offset, mask=valid, other=0)
    return word


@triton.jit
def magnitude(word, bits: tl.constexpr):
    """A word of a float without its sign bit."""
    mask: tl.constexpr = (1 << (bits - 1)) - 1
    return word & mask


@triton.jit
def is_signed(word, bits: tl.constexpr):
    """True if the sign bit of a word is set."""
    return (word >> (bits - 1)) != 0


@triton.jit
def as_float64(word, form: tl.constexpr):
    """The number that a word of a float format spells, exactly."""
    if form == "float64":
        value = word.to(tl.float64, bitcast=True)
    elif form == "float32":
        value = word.to(tl.float32, bitcast=True).to(tl.float64)
    elif form == "bfloat16":
        value = (word << 16).to(tl.float32, bitcast=True).to(tl.float64)
    elif form == "float16":
        value = word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.float64)
    elif form == "float8_e5m2":  # float16 without its last 8 bits
        value = (word << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.float64)
    else:  # float8_e4m3fn: a float16 exponent has one bit more, and a bias larger by 8
        half = (((word & 0x80) << 8) | ((word & 0x7F) << 7)).to(tl.uint16)
        value = half.to(tl.float16, bitcast=True).to(tl.float32).to(tl.float64) * 256.0
    return value


@triton.jit
def as_integer(word, form: tl.constexpr, bits: tl.constexpr):
    """The number that a word of an integer dtype spells, int64."""
    value = word.to(tl.int64)
    if form == "signed" and bits < 64:
        sign: tl.constexpr = 1 << (bits - 1)
        value = (value ^ sign) - sign
    return value


@triton.jit
def order_key(word, form: tl.constexpr, bits: tl.constexpr):
    """A signed integer that is ordered as the element's number is; -0 and +0 are both 0."""
    if form == "signed" or form == "unsigned":
        key = as_integer(word, form, bits)
    else:
        size = magnitude(word, bits)
        size = size.to(tl.int64) if bits == 64 else size.to(tl.int32)
        key = tl.where(is_signed(word, bits), -size, size)
    return key


@triton.jit
def key_as_float64(key, form: tl.constexpr):
    """The number whose order key this is."""
    if form == "signed" or form == "unsigned":
        value = key.to(tl.float64)
    else:
        size = tl.abs(key)
        word = size.to(tl.uint64) if form == "float64" else size.to(tl.uint32)
        value = as_float64(word, form)
        value = tl.where(key < 0, -value, value)
    return value


@triton.jit
def size_as_float64(size, form: tl.constexpr):
    """The number whose magnitude, as `element_size` gives it, this is."""
    return size.to(tl.float64) if form == "signed" or form == "unsigned" else as_float64(size, form)


@triton.jit
def element_size(word, form: tl.constexpr, bits: tl.constexpr):
    """|x| as an unsigned integer: the magnitude bits of a float, the absolute value of an integer."""
    if form == "signed" or form == "unsigned":
        value = as_integer(word, form, bits)
        size = tl.where(value < 0, -value, value).to(tl.uint64)
    else:
        size = magnitude(word, bits)
    return size
