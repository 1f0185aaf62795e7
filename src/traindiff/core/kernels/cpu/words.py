"""Sums of the 64-bit words of stretches of memory, in lanes, as fast as it can be read."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

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


class Marks:
    """Marks of several stretches of memory, one after the other.

    Of each: the sums of its table of words, as by `sums`, and then the bytes behind the table.

    Args:
        sizes: Of each stretch: the rows of its table, and how many bytes follow the table.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        self._sizes = np.array(sizes, dtype=np.int64).reshape(-1, 2)
        lengths = [8 * LANES * (rows > 0) + rest for rows, rest in sizes]
        self.ends = [*accumulate(lengths)]

    def read(self, addresses: array[int]) -> NDArray[np.uint8]:
        """The marks of the memory that begins at these addresses, without the interpreter lock."""
        found = np.empty(self.ends[-1] if self.ends else 0, np.uint8)
        sizes, first = int(self._sizes.ctypes.data), addresses.buffer_info()[0]
        _functions()[1](first, sizes, len(addresses), int(found.ctypes.data))
        return found


def _function() -> Callable[..., None]:
    """`add(words, count, found)`."""
    return _functions()[0]


@cache
def _functions() -> tuple[Callable[..., None], Callable[..., None]]:
    """Build `add(words, count, found)`, and `mark(addresses, sizes, count, found)`."""
    code = machine_code("words", _module)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    return code("add", pointer, number, pointer), code("mark", pointer, pointer, number, pointer)


def _module() -> ir.Module:
    """The LLVM IR: the same for every machine."""
    module = ir.Module("words")
    _mark_function(module, _add_function(module))
    return module


def _mark_function(module: ir.Module, add: ir.Function) -> None:
    signature = ir.FunctionType(ir.VoidType(), [POINTER, POINTER, I64, POINTER])
    code = Code(ir.Function(module, signature, "mark"))
    addresses, sizes, count, found = code.arguments
    byte, zero = ir.IntType(8), code.constant(I64, 0)
    place = code.variable(zero)
    with code.loop(zero, count, 1) as number:
        memory = code.load(code.at(addresses, number, POINTER), POINTER)
        rows, rest = (code.load(code.at(sizes, number * 2 + offset, I64), I64) for offset in (0, 1))
        with code.when(rows > 0):
            code.call(add, memory, rows * LANES, code.at(found, place.value, byte))
            place.add(8 * LANES)
        behind, to = code.at(memory, rows * (8 * LANES), byte), code.at(found, place.value, byte)
        with code.loop(zero, rest, 1) as one:
            code.store(code.at(to, one, byte), code.load(code.at(behind, one, byte), byte))
        place.add(rest)
    code.finish()


def _add_function(module: ir.Module) -> ir.Function:
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
    return code.function
