"""Flip one bit of a tensor as hardware does, and the training in which that is done."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from traindiff.core.summary import UNIT_ROUNDOFF

STEPS, BATCH, LENGTH, WIDTH, VOCABULARY = 5, 4, 128, 64, 128
OBSERVED = ("batch", "loss", "grad", "grad.micro", "optimizer", "update", "param", "replay", "witness", "products")
LEAST = 100.0
"""Roundings of an element below which a flip is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One bit that was flipped.

    Attributes:
        step: The step in which it first counts.
        site: Path of the parameter or module.
        roundings: Change of the element, in roundings of it.
        share: Change as a part of the norm of the tensor.
        rank: The rank on which it flips; None if that is not one of several.
    """

    step: int
    site: str
    roundings: float
    share: float
    rank: int | None = None


def batch(data: torch.Generator) -> Tensor:
    """Tokens of a step."""
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data)


def flipped(tensor: Tensor, generator: torch.Generator, *, step: int, site: str, rank: int | None = None) -> Flip:
    """Flip a random bit of a random element that is not 0, so that it changes by at least `LEAST` roundings.

    It is done as hardware does it: no operator of torch sees it, and no counter of writes.
    """
    width = 8 * tensor.element_size()
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    bits = np.frombuffer(memory, dtype=f"u{width // 8}")
    size = float(np.linalg.norm(_values(bits).astype(np.float64)))
    unit = UNIT_ROUNDOFF[str(tensor.dtype).removeprefix("torch.")]
    while True:
        place, bit = (int(torch.randint(one, (), generator=generator)) for one in (bits.size, width))
        before = float(_values(bits[place : place + 1])[0])
        if before == 0.0:
            continue
        bits[place] ^= bits.dtype.type(1 << bit)
        change = abs(float(_values(bits[place : place + 1])[0]) - before)
        if LEAST * unit * abs(before) <= change < float("inf"):
            return Flip(step=step, site=site, roundings=change / (unit * abs(before)), share=change / size, rank=rank)
        bits[place] ^= bits.dtype.type(1 << bit)


def _values(bits: NDArray[Any]) -> NDArray[np.float32]:
    """The numbers of float32, or of bfloat16, given by their bits."""
    return (bits if bits.itemsize == 4 else bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
