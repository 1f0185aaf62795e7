"""Move every element of a tensor by -1, 0 or +1 unit in the last place, by bits that depend on nothing but a key."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}

_INFINITY = {
    torch.float64: 0x7FF << 52,
    torch.float32: 0xFF << 23,
    torch.bfloat16: 0xFF << 7,
    torch.float16: 0x1F << 10,
}
"""The bits of infinity; those of finite numbers are below, those of NaN above, the sign apart."""

_BLOCK = 1 << 24
"""Elements at a time: bounds the memory for random bits."""


def is_rounded(tensor: Tensor) -> bool:
    """Whether `randomly_rounded` moves elements of such a tensor: float64, 32 or 16 bits, complex, dense."""
    real = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    return real in _INTEGERS and tensor.layout is torch.strided and not tensor.is_quantized


def rounding_key(*parts: object) -> int:
    """32 bits that depend on all parts: a seed, a step, the names of a site."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "little", signed=True)


def randomly_rounded(tensor: Tensor, key: int) -> Tensor:
    """A copy of `tensor` whose elements were moved by -1, 0 or +1 ulp, each with probability 1/3.

    Zeros, infinities and NaN stay, and no element becomes one of them; so no sign changes either. Random
    bits are a hash of the key, the element's index and its value: equal tensors are rounded alike
    under one key, in whatever order they come, which is what repeats a forward pass exactly.

    Args:
        tensor: One for which `is_rounded` holds, any shape. It is not changed.
        key: From `rounding_key`.

    Returns:
        Same shape, dtype, device and strides (for dense tensors). Nothing is synchronized.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    rounded = torch.empty_like(tensor)  # a tensor of its own: autograd forbids writing to a function's view
    if tensor.is_complex():
        torch.view_as_real(rounded).copy_(randomly_rounded(torch.view_as_real(tensor), key))
        return rounded
    dtype = tensor.dtype
    bits = tensor.contiguous().view(_INTEGERS[dtype]).reshape(-1)
    moved = torch.empty_like(bits)
    for first in range(0, bits.numel(), _BLOCK):
        block = slice(first, first + _BLOCK)
        moved[block] = _moved(bits[block], infinity=_INFINITY[dtype], key=rounding_key(key, first) if first else key)
    return rounded.copy_(moved.view(dtype).view(tensor.shape))


def _moved(bits: Tensor, *, infinity: int, key: int) -> Tensor:
    """Floating-point numbers as integers [n], moved.

    Their order is that of the numbers, away from zero, so one more is one ulp more.
    """
    magnitude = bits & torch.iinfo(bits.dtype).max
    step = _thirds(bits, key).to(bits.dtype)
    after = magnitude + step  # of a NaN it may overflow, to something negative
    stays = (magnitude == 0) | (magnitude >= infinity) | (after <= 0) | (after >= infinity)
    return bits + step.masked_fill_(stays, 0)


def _thirds(bits: Tensor, key: int) -> Tensor:
    """-1, 0 or 1, by a hash of key, index and value: int32 [n]. Products wrap around."""
    word = (bits ^ (bits >> 32) if bits.dtype == torch.int64 else bits).to(torch.int32)
    word = word.mul(_signed(0x9E3779B1)).add_(key)
    word += torch.arange(len(bits), dtype=torch.int32, device=bits.device).mul_(_signed(0x85EBCA77))
    # A bijection of 32-bit words in which every bit depends on every bit (lowbias32 of
    # https://nullprogram.com/blog/2018/07/31/).
    word = _xor_shift(word, 16).mul_(0x7FEB352D)
    word = _xor_shift(word, 15).mul_(_signed(0x846CA68B))
    word = _xor_shift(word, 16)
    return word.bitwise_and_(0xFFFF).mul_(3).bitwise_right_shift_(16).sub_(1)


def _xor_shift(word: Tensor, count: int) -> Tensor:
    """`word ^ (word >> count)`, the shift logical."""
    return word.bitwise_xor_((word >> count).bitwise_and_((1 << (32 - count)) - 1))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
