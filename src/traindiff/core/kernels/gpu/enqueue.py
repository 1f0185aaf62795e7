"""Launch a kernel again without Triton's search for what was compiled, and read matrices in kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

FLOATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""The dtypes that `load` reads, by the names that it takes."""

_compiled: dict[tuple[Any, ...], Any] = {}
"""What was compiled, by the id of the kernel, its constants and the device; None if it cannot be called."""


def enqueue(
    kernel: Any, device: torch.device, grid: tuple[int, ...], numbers: Sequence[int], *constants: Any, **options: Any
) -> None:
    """Launch a kernel on the current stream of a device.

    Triton's own way finds out at each launch which compiled kernel its arguments ask for, in 40 us. No number may be
    specialized on, so that what it found the first time is right for all.

    Args:
        kernel: Made with `do_not_specialize` of all its numbers.
        device: Of what the numbers are addresses of; the CPU, in Triton's interpreter.
        grid: Numbers of programs, along up to three axes.
        numbers: Its first arguments.
        constants: Its other ones, `tl.constexpr`.
        options: How it is compiled: always the same.
    """
    if device.index is not None and device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            enqueue(kernel, device, grid, numbers, *constants, **options)
        return
    key = id(kernel), constants, device  # its own hash is that of its source
    compiled = _compiled.get(key)
    if compiled is not None:
        try:
            compiled[(*grid, 1, 1)[:3]](*numbers, *constants)
        except TypeError:  # this Triton takes other arguments: nothing was launched
            _compiled[key] = None
        else:
            return
    found = kernel[grid](*numbers, *constants, **options)
    if key not in _compiled and hasattr(found, "__getitem__"):
        _compiled[key] = found


def reads(*matrices: torch.Tensor) -> bool:
    """True for matrices in dtypes that `load` knows."""
    return all(one.dtype in FLOATS for one in matrices)


@lru_cache(maxsize=4096)
def numbers_on(device: torch.device, *numbers: float) -> torch.Tensor:
    """Numbers on a device, float64; copied there once."""
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def ceiling(number: int, by: int) -> int:
    """A quotient, rounded up; `triton.cdiv` takes 10 us."""
    return -(-number // by)


@triton.jit
def load(address, places, valid, kind: tl.constexpr):
    """Elements of a matrix as float32: at `places`, counted in elements, or 0 where not `valid`."""
    if kind == "bfloat16":
        bits = tl.load(address.to(tl.pointer_type(tl.int16)) + places, mask=valid, other=0)
        found = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif kind == "float16":
        found = tl.load(address.to(tl.pointer_type(tl.float16)) + places, mask=valid, other=0.0).to(tl.float32)
    else:
        found = tl.load(address.to(tl.pointer_type(tl.float32)) + places, mask=valid, other=0.0)
    return found


@triton.jit
def doubles(address):
    """An address as a pointer to float64."""
    return tl.cast(address, tl.int64).to(tl.pointer_type(tl.float64))
