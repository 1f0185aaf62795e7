"""The extent of a tensor on the CPU, as fast as its memory can be read.

Without their sign bits, floating-point numbers are ordered as the integers with the same bits: infinity above all
numbers, and NaN above infinity. So the magnitudes are compared as integers.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache, reduce

import torch
from llvmlite import ir

from traindiff.core.kernels.cpu.code import Code, Variable, machine_code
from traindiff.core.kernels.cpu.layout import DTYPES, FloatDtype
from traindiff.core.kernels.cpu.values import F64, I64, POINTER, Value
from traindiff.core.kernels.extent import Extent
from traindiff.core.kernels.torch_arrays import address

NAMES = {
    getattr(torch, name): name
    for name, dtype in DTYPES.items()
    if isinstance(dtype, FloatDtype) and hasattr(torch, name)
}
"""Dtypes that the kernel reads."""

_REGISTERS = 4
"""Vectors that are read before the first one is needed: enough to hide the latency of a read."""

_VECTOR_BYTES = 64

_scratch = threading.local()


def reads(tensor: torch.Tensor) -> bool:
    """True if the kernel can read this tensor where it is."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.dtype in NAMES and tensor.layout == torch.strided and not tensor.is_nested


def extent(tensor: torch.Tensor) -> Extent:
    """The extent of a CPU tensor that `reads` accepts; see `traindiff.core.kernels.extent.extent`.

    One pass over its memory, without the interpreter lock. A strided tensor with gaps is copied first.
    """
    count = tensor.numel()
    if not count:
        return Extent(float("nan"), float("nan"), 0)
    if not _is_dense(tensor):
        tensor = tensor.detach().contiguous()
    first = address(tensor)
    if not hasattr(_scratch, "found"):
        _scratch.found = (ctypes.c_double * 2)()
    _function(NAMES[tensor.dtype])(first, count, _scratch.found)
    smallest, largest = _scratch.found
    return Extent(smallest, largest, count)


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill a stretch of memory, in any order."""
    if tensor.is_contiguous():
        return True
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != reach:
                return False
            reach *= size
    return True


@cache
def _function(name: str) -> Callable[..., None]:
    """Build `extent(x, count, found)`, which writes the least and the largest magnitude; `count` is at least 1."""
    code = machine_code(f"extent_{name}", lambda: _module(name))
    found: Callable[..., None] = code("extent", ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    return found


def _module(name: str) -> ir.Module:
    """The LLVM IR: the same for every machine."""
    module = ir.Module(f"extent_{name}")
    dtype = DTYPES[name]
    assert isinstance(dtype, FloatDtype)
    signature = ir.FunctionType(ir.VoidType(), [POINTER, I64, POINTER])
    code = Code(ir.Function(module, signature, "extent"))
    x, count, out = code.arguments
    lanes = 8 * _VECTOR_BYTES // dtype.bits
    kind = ir.VectorType(dtype.stored, lanes)
    least = [code.variable(code.constant(kind, dtype.magnitude_mask)) for _ in range(_REGISTERS)]
    most = [code.variable(code.constant(kind, 0)) for _ in range(_REGISTERS)]
    together = lanes * _REGISTERS
    whole = count - count % together
    with code.loop(code.constant(I64, 0), whole, together) as first:
        for number in range(_REGISTERS):
            read = code.load(code.at(x, first + number * lanes, dtype.stored), kind) & dtype.magnitude_mask
            _include(read, least[number], most[number])
    smallest = code.variable(reduce(Value.smaller, (one.value for one in least)).least())
    largest = code.variable(reduce(Value.larger, (one.value for one in most)).greatest())
    with code.loop(whole, count, 1) as index:
        _include(code.load(code.at(x, index, dtype.stored), dtype.stored) & dtype.magnitude_mask, smallest, largest)
    # Where there is a NaN, it is the largest, and the least is NaN too.
    has_nan = largest.value > dtype.infinity
    code.store(out, dtype.value(has_nan.choose(largest.value, smallest.value)).widened(F64))
    code.store(code.at(out, 1, F64), dtype.value(largest.value).widened(F64))
    code.finish()
    return module


def _include(read: Value, least: Variable, most: Variable) -> None:
    least.value, most.value = read.smaller(least.value), read.larger(most.value)
