"""The whole CPU kernel: one function per dtype, built for the host when a tensor of this dtype first comes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir

from traindiff.core.kernels.cpu import totals
from traindiff.core.kernels.cpu.code import Code, machine_code
from traindiff.core.kernels.cpu.layout import COUNTS, DTYPES, FIELDS, SIZE, FloatDtype, IntegerDtype
from traindiff.core.kernels.cpu.profiles import place_function, profiles_function
from traindiff.core.kernels.cpu.values import F32, F64, I64, POINTER, Value, vector
from traindiff.core.kernels.reference import BLOCK
from traindiff.core.shards import BUCKETS
from traindiff.core.summary import SKETCH_SIZE, SUMMARY

Add = Callable[[int, int, int, int, int, int, int, int, int, int], None]
"""`add(x, runs, length, x_step, index, index_step, columns, row_block, column_block, state)`: accumulate `runs` runs of
`length` contiguous elements. Run r begins `r * x_step` elements after `x`, at global index `index + r * index_step`."""

RUN = ("runs", "length", "x_step", "index", "index_step", "columns", "row_block", "column_block", "count")
"""What `whole` is told of a tensor beside its address: 64-bit words, in this order; see `Add` and `Frame.finish`."""

Whole = Callable[[int, int, int, int], None]
"""`whole(x, run, state, summary)`: `begin`, `add` and `finish` in one call; `run` is the address of a `RUN` that is
not empty."""

Each = Callable[[int, int, int, int, int, int], None]
"""`each(x, run, place, count, state, summaries)`: `whole` for `count` tensors. `x`, `run` and `place` are addresses of
arrays of 64-bit words: the addresses of all tensors and of their `RUN`s, and which of them are of this dtype. The
summary of tensor i is written to row i of `summaries`."""

_WORD, _POINTER = ctypes.c_int64, ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Frame:
    """Functions that are the same for all dtypes.

    Attributes:
        begin: `begin(state)`: an empty state.
        finish: `finish(state, summary, count)`: write the state as a SUMMARY of `count` elements.
    """

    begin: Any
    finish: Any


@cache
def frame() -> Frame:
    """Build them, once per process."""
    return Frame(
        begin=_function("frame", "begin", _POINTER),
        finish=_function("frame", "finish", _POINTER, _POINTER, _WORD),
    )


@cache
def add(name: str) -> Add:
    """Build the function that accumulates elements of a dtype; takes 0.1 to 0.2 s, once per process."""
    found: Add = _function(name, f"add_{name}", _POINTER, *[_WORD] * 8, _POINTER)
    return found


@cache
def whole(name: str) -> Whole:
    """Build the function that summarizes one stretch of memory of a dtype in one call."""
    found: Whole = _function(name, f"whole_{name}", *[_POINTER] * 4)
    return found


@cache
def each(name: str) -> Each:
    """Build the function that summarizes many tensors of a dtype in one call, each of them one stretch of memory."""
    found: Each = _function(name, f"each_{name}", _POINTER, _POINTER, _POINTER, _WORD, _POINTER, _POINTER)
    return found


def build_module(name: str) -> ir.Module:
    """The LLVM IR of a dtype's functions, or of the `frame`: the same for every machine."""
    module = ir.Module(name)
    if name == "frame":
        _begin_function(module)
        _finish_function(module)
    else:
        _each_function(module, _whole_function(module, _add_function(module, DTYPES[name]), name), name)
    return module


def _function(module: str, name: str, *arguments: Any) -> Any:
    return machine_code(module, lambda: build_module(module))(name, *arguments)


def _whole_function(module: ir.Module, accumulate: ir.Function, dtype: str) -> ir.Function:
    """Define `whole_...`; see `Whole`."""
    begin, finish = _begin_function(module), _finish_function(module)
    code = Code(ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER] * 4), f"whole_{dtype}"))
    x, run, state, summary = code.arguments
    *words, count = (code.load(code.at(run, place, I64), I64) for place in range(len(RUN)))
    code.call(begin, state)
    code.call(accumulate, x, *words, state)
    code.call(finish, state, summary, count)
    code.finish()
    return code.function


def _each_function(module: ir.Module, summarize: ir.Function, dtype: str) -> None:
    """Define `each_...`; see `Each`."""
    signature = ir.FunctionType(ir.VoidType(), [POINTER, POINTER, POINTER, I64, POINTER, POINTER])
    code = Code(ir.Function(module, signature, f"each_{dtype}"))
    x, run, place, count, state, summaries = code.arguments
    with code.loop(code.constant(I64, 0), count, 1) as number:
        row = code.load(code.at(place, number, I64), I64)
        summary = code.at(summaries, row * SUMMARY.itemsize, ir.IntType(8))
        pointers = (code.load(code.at(words, row, POINTER), POINTER) for words in (x, run))
        code.call(summarize, *pointers, state, summary)
    code.finish()


def _add_function(module: ir.Module, dtype: FloatDtype | IntegerDtype) -> ir.Function:
    """Define `add_...`; see `Add`."""
    blocks, elements = totals.blocks_function(module, dtype), totals.elements_function(module, dtype)
    code = Code(
        ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, *[I64] * 8, POINTER]), f"add_{dtype.name}")
    )
    base, runs, length, x_step, index, index_step, *grid, state = code.arguments
    zero = code.constant(I64, 0)
    with code.loop(zero, runs, 1) as run:
        start = index + run * index_step
        ahead = (zero - start) & (BLOCK - 1)
        head = (ahead < length).choose(ahead, length)  # elements up to the next block
        x = code.at(base, run * x_step, dtype.stored)
        body = head + (((length - head) >> 6) << 6)  # elements up to the end of the last whole block
        if isinstance(dtype, FloatDtype):
            place, profiles = place_function(module), profiles_function(module, dtype)
            usual = FIELDS["usual"].pointer(code, state)
            code.call(place, start, state, *grid)
            code.store(usual, zero)
            code.call(elements, x, zero, head, start, state)
            code.call(profiles, x, zero, head, state, *grid)
            with code.loop(head, body, totals.CHUNK) as first:
                end = first + totals.CHUNK
                stop = (end < body).choose(end, body)
                code.call(blocks, x, first, stop, (start + first) >> 6, state)
                code.call(profiles, x, first, stop, state, *grid)
            code.store(usual, zero)
            code.call(elements, x, body, length, start + body, state)
            code.call(profiles, x, body, length, state, *grid)
        else:
            code.call(elements, x, zero, head, start, state)
            code.call(blocks, x, head, body, (start + head) >> 6, state)
            code.call(elements, x, body, length, start + body, state)
    code.finish()
    return code.function


def _begin_function(module: ir.Module) -> ir.Function:
    code = Code(ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "begin"))
    (state,) = code.arguments
    with code.loop(code.constant(I64, 0), code.constant(I64, SIZE // 8), 1) as word:
        code.store(code.at(state, word, I64), code.constant(I64, 0))
    for name, value in (("minimum", float("inf")), ("maximum", float("-inf")), ("smallest", float("inf"))):
        code.store(FIELDS[name].pointer(code, state), code.constant(vector(F64), value))
    code.finish()
    return code.function


def _finish_function(module: ir.Module) -> ir.Function:
    code = Code(ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, POINTER, I64]), "finish"))
    state, summary, count = code.arguments

    def out(name: str, index: Value | int = 0) -> Value:
        assert SUMMARY.fields is not None
        start = code.at(summary, SUMMARY.fields[name][1], ir.IntType(8))
        return code.at(start, index, I64)  # every number of a SUMMARY has 8 bytes

    def lanes(name: str, bucket: Value | int = 0) -> Value:
        field = FIELDS[name]
        index = bucket if isinstance(bucket, Value) else code.constant(I64, bucket)
        return code.load(field.vector_pointer(code, state, index), vector(field.element))

    code.store(out("count"), count)
    for name in COUNTS:
        code.store(out(name), code.load(FIELDS[name].pointer(code, state), I64))
    for name in ("sum", "fingerprint", "multiset", "nonfinite"):
        code.store(out(name), lanes(name).total())
    code.store(out("minimum"), lanes("minimum").least())
    code.store(out("maximum"), lanes("maximum").greatest())
    code.store(out("smallest"), lanes("smallest").least())
    zero = code.constant(I64, 0)
    with code.loop(zero, code.constant(I64, SKETCH_SIZE), 1) as bucket:
        low = code.load(FIELDS["sketch"].pointer(code, state, bucket), F64)
        high = code.load(FIELDS["sketch"].pointer(code, state, bucket + SKETCH_SIZE), F64)
        code.store(out("sketch", bucket), low + high)
    squares = code.variable(code.constant(F64, 0.0))
    with code.loop(zero, code.constant(I64, BUCKETS), 1) as bucket:
        row = lanes("row_squares", bucket).total()
        squares.value = squares.value + row
        code.store(out("row_squares", bucket), row)
        code.store(out("column_squares", bucket), lanes("column_squares", bucket).total())
        for axis in ("row", "column"):
            short = lanes(f"{axis}_largest_{F32}", bucket).widened(F64)
            code.store(out(f"{axis}_largest", bucket), lanes(f"{axis}_largest_{F64}", bucket).larger(short).greatest())
    code.store(out("sum_of_squares"), squares.value)
    code.finish()
    return code.function
