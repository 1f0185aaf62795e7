"""Sums of the 64-bit words of a stretch of memory, in lanes, as fast as it can be read."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from llvmlite import ir

from traindiff.core.kernels.cpu.code import Code, machine_code
from traindiff.core.kernels.cpu.values import I64, POINTER

LANES = 64
"""Lanes of words: eight registers of 512 bits."""

_AHEAD_BYTES = 16384
"""Far enough that pages which are not the one being read are on their way, too."""

_LINE_BYTES = 64


def sums(address: int, rows: int) -> bytes:
    """The sums modulo 2^64 of the columns of a table of words with LANES columns, without the interpreter lock.

    Args:
        address: Of the first word.
        rows: Rows of the table.
    """
    found = (ctypes.c_uint64 * LANES)()
    _function()(address, rows * LANES, found)
    return bytes(found)


@cache
def _function() -> Callable[..., None]:
    """Build `add(words, count, found)`."""
    code = machine_code("words", _module)
    found: Callable[..., None] = code("add", ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    return found


def _module() -> ir.Module:
    """The LLVM IR: the same for every machine."""
    module = ir.Module("words")
    signature = ir.FunctionType(ir.VoidType(), [POINTER, I64, POINTER])
    code = Code(ir.Function(module, signature, "add"))
    words, count, found = code.arguments
    kind = ir.VectorType(I64, LANES)
    total = code.variable(code.constant(kind, 0))
    with code.loop(code.constant(I64, 0), count, LANES) as first:
        for byte in range(_AHEAD_BYTES, _AHEAD_BYTES + 8 * LANES, _LINE_BYTES):
            code.prefetch(code.at(words, first + byte // 8, I64))
        total.add(code.load(code.at(words, first, I64), kind))
    code.store(found, total.value)
    code.finish()
    return module
