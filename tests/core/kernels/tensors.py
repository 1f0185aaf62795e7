"""Hypothesis strategies for tensors: any bits, any dtype, any shape, any strides."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.core.kernels.oracle import FORMATS

_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tensor, and what is known of it without asking torch: its bits in row-major order."""

    tensor: Tensor
    bits: list[int]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


def from_bits(bits: np.ndarray, dtype: str) -> Tensor:
    """A tensor with these bits, which are unsigned integers of the dtype's width."""
    return torch.from_numpy(np.array(bits, order="C")).view(getattr(torch, dtype))


def bits_of(dtype: str) -> st.SearchStrategy[int]:
    """Any bit pattern; the interesting ones often."""
    form = FORMATS[dtype]
    if dtype == "bool":
        return st.integers(0, 1)
    top = 2**form.width - 1
    if not form.exponent_bits:
        return st.one_of(st.sampled_from([0, 1, top, top // 2, top // 2 + 1]), st.integers(0, top))
    sign, exponent_of_1 = 2 ** (form.width - 1), form.bias << form.mantissa_bits
    infinity = (2**form.exponent_bits - 1) << form.mantissa_bits
    special = [
        0, 1, 2**form.mantissa_bits - 1, 2**form.mantissa_bits,
        exponent_of_1, exponent_of_1 + 1, infinity - 1, infinity, infinity + 1, sign - 1,
    ]  # fmt: skip
    special += [sign | one for one in special]
    ordinary = st.integers(-8, 8).map(lambda e: (form.bias + max(e, -form.bias // 2)) << form.mantissa_bits)
    mantissas = st.integers(0, 2**form.mantissa_bits - 1)
    return st.one_of(st.sampled_from(special), st.integers(0, top), st.builds(int.__or__, ordinary, mantissas))


shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    st.tuples(st.integers(60, 140)),
    st.tuples(st.integers(1, 4), st.integers(60, 70)),
    st.tuples(st.integers(17, 40), st.integers(1, 5)),
)


@st.composite
def arrays(draw: st.DrawFn, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bits of a tensor of this shape."""
    size = prod(shape)
    drawn = draw(st.lists(bits_of(dtype), min_size=size, max_size=size))
    return np.array(drawn, dtype=_UNSIGNED[FORMATS[dtype].width]).reshape(shape)


def _contiguous(bits: np.ndarray, dtype: str) -> Tensor:
    return from_bits(bits, dtype)


def _transposed(bits: np.ndarray, dtype: str) -> Tensor:
    axes = tuple(reversed(range(bits.ndim)))
    return from_bits(bits.transpose(axes), dtype).permute(axes)


def _strided(bits: np.ndarray, dtype: str) -> Tensor:
    wide = np.zeros((*bits.shape, 3), dtype=bits.dtype)
    wide[..., 1] = bits
    return from_bits(wide, dtype)[..., 1]


LAYOUTS = {"contiguous": _contiguous, "transposed": _transposed, "strided": _strided}


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[str, ...] = tuple(FORMATS)) -> Case:
    """Tensors of all dtypes, shapes and strides, expanded ones included."""
    dtype = draw(st.sampled_from(dtypes))
    bits = draw(arrays(dtype, draw(shapes)))
    tensor = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](bits, dtype)
    if draw(st.booleans()):
        times = draw(st.integers(0, 3))
        tensor = tensor.expand(times, *tensor.shape)
        bits = np.broadcast_to(bits, (times, *bits.shape))
    return Case(tensor=tensor, bits=bits.reshape(-1).tolist(), dtype=dtype)
