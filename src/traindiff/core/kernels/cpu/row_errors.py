"""How far the rows of a product are from the exact ones, on the CPU: one call, for the few numbers of each row."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from llvmlite import ir

from traindiff.core.kernels.cpu.code import Code, machine_code
from traindiff.core.kernels.cpu.values import F64, I64, LANES, POINTER, Value
from traindiff.core.kernels.row_errors import NUMBERS, TINY, Bound, Weights, bound_of

_INFINITY = float("inf")
_BITS = 63
"""Bits of a number that is not negative: as whole numbers, they are in the order of the numbers."""


def row_errors(
    sums: torch.Tensor, made: torch.Tensor, by: Weights, largest: Any, added: tuple[Any, Any],
    counts: Sequence[int] = (),
) -> torch.Tensor:  # fmt: skip
    """See `traindiff.core.kernels.row_errors.row_errors`; without the interpreter lock."""
    rows = sums.shape[1]
    size = NUMBERS + len(counts)
    found = torch.empty(size + rows, dtype=torch.float64, device="cpu")  # behind the numbers there is room for work
    numbers = array("d", map(float, (*bound_of(by, largest, added), *counts)))
    _function()(
        sums.data_ptr(), made.data_ptr(), rows, numbers.buffer_info()[0], len(counts), found.data_ptr(),
    )  # fmt: skip
    return found[:size]


@cache
def _function() -> Callable[..., None]:
    """Build `errors(sums, made, rows, bound, counts, found)`; so many counts follow the numbers of the bound."""
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    code = machine_code("row_errors", _module)
    made: Callable[..., None] = code("errors", pointer, pointer, word, pointer, word, pointer)
    return made


def _module() -> ir.Module:
    """The LLVM IR: the same for every machine."""
    module = ir.Module("row_errors")
    errors_function(module)
    return module


def errors_function(module: ir.Module) -> ir.Function:
    """Define `errors`; see `_function`."""
    signature = ir.FunctionType(ir.VoidType(), [POINTER, POINTER, I64, POINTER, I64, POINTER])
    code = Code(ir.Function(module, signature, "errors"))
    sums, made, rows, bound, counts, found = code.arguments
    offset, of_result, of_partial, coherent, most, constant = (
        code.load(code.at(bound, number, F64), F64) for number in range(len(Bound._fields))
    )
    zero, nothing = code.constant(I64, 0), code.constant(F64, 0.0)
    work = code.at(found, counts + NUMBERS, F64)
    largest, place, inexact = code.variable(nothing), code.variable(zero), code.variable(zero)
    squares = [code.variable(nothing) for _ in range(4)]
    with code.loop(zero, rows, 1) as row:

        def of(table: Value, number: int, row: Value = row) -> Value:
            return code.load(code.at(table, rows * number + row, F64), F64)

        terms, result = _root(code, of(sums, 1)), _root(code, of(made, 1))
        partial = _root(code, of(sums, 2)).larger(terms.larger(result))
        coherence = (partial // terms.larger(code.constant(F64, TINY))).larger(code.constant(F64, 1.0)).smaller(most)
        error = code.intrinsic("llvm.fabs", of(made, 0) - (of(sums, 0) + offset))
        allowed = of_result * result + (of_partial + coherent * coherence) * partial + constant
        ratio = error // allowed
        with code.when(ratio < _INFINITY):
            for total, one in zip(squares, (terms, result, error, allowed), strict=True):
                total.add(one * one)
            with code.when(ratio > largest.value):
                largest.value, place.value = ratio, row
            with code.when(ratio > nothing):
                code.store(code.at(work, inexact.value, F64), ratio)
                inexact.add(1)
    of_terms, of_result, *norms = (_root(code, total.value) for total in squares)
    size = of_terms.larger(of_result)
    numbers = [largest.value, place.value.to_float(signed=True), _median(code, work, inexact.value, largest.value)]
    for norm in norms:
        share = norm // size
        numbers.append(((size > nothing) & (share >= nothing)).choose(share, nothing))
    for place_of, one in enumerate(numbers):
        code.store(code.at(found, place_of, F64), one)
    with code.loop(zero, counts, 1) as number:
        code.store(
            code.at(found, number + NUMBERS, F64), code.load(code.at(bound, number + len(Bound._fields), F64), F64)
        )
    code.finish()
    return code.function


def _root(code: Code, value: Value) -> Value:
    return code.intrinsic("llvm.sqrt", value)


def _median(code: Code, values: Value, count: Value, largest: Value) -> Value:
    """The lower median of positive numbers in memory, 0 of none: found by halving the range in which it lies."""
    zero, one = code.constant(I64, 0), code.constant(I64, 1)
    before = (count > 0).choose((count - 1) >> 1, zero)  # so many are in front of it
    low, high = code.variable(zero), code.variable(largest.reinterpreted(I64))
    even = count - count % LANES
    with code.loop(zero, code.constant(I64, _BITS), 1):
        middle = (low.value + high.value) >> 1
        below = code.variable(zero)

        def add(first: Value, kind: ir.Type, middle: Value = middle) -> None:
            below.add((code.load(code.at(values, first, I64), kind) <= middle).count())

        with code.loop(zero, even, LANES) as first:
            add(first, ir.VectorType(I64, LANES))
        with code.loop(even, count, 1) as first:
            add(first, I64)
        enough = below.value > before
        low.value = enough.choose(low.value, (low.value < high.value).choose(middle + one, low.value))
        high.value = enough.choose(middle, high.value)
    return low.value.reinterpreted(F64)
