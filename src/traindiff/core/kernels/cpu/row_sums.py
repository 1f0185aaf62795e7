"""Sums over the rows of a matrix on the CPU, in float64, in one pass at about the speed of memory.

Columns are taken in LANES lanes: lane l adds up the columns l, l + LANES, ..., and the lanes are added up as a tree.
Every machine does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch
from llvmlite import ir

from traindiff.core.kernels.cpu.code import Code, Variable, has_feature, machine_code
from traindiff.core.kernels.cpu.extent import NAMES
from traindiff.core.kernels.cpu.layout import DTYPES, FloatDtype
from traindiff.core.kernels.cpu.projection import reads
from traindiff.core.kernels.cpu.values import F64, I64, POINTER, Value
from traindiff.core.kernels.row_sums import BLOCK, LANES
from traindiff.core.kernels.torch_arrays import address

__all__ = ["reads", "row_sums", "table_sums"]

_KIND = ir.VectorType(F64, LANES)


def row_sums(matrix: torch.Tensor, factors: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """See `traindiff.core.kernels.row_sums.row_sums`; without the interpreter lock."""
    rows, columns = matrix.shape
    found = torch.empty((3, rows), dtype=torch.float64, device="cpu")
    _functions(NAMES[matrix.dtype])[0](
        address(matrix), rows, matrix.stride(0), columns, address(factors), address(squares), found.data_ptr()
    )
    return found


def table_sums(
    matrix: torch.Tensor, row_factors: torch.Tensor, column_factors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `traindiff.core.kernels.row_sums.table_sums`; without the interpreter lock."""
    rows, columns = matrix.shape
    by_column = torch.zeros((2, columns), dtype=torch.float64, device="cpu")
    by_row = torch.empty((2, rows), dtype=torch.float64, device="cpu")
    _functions(NAMES[matrix.dtype])[1](
        address(matrix), rows, matrix.stride(0), columns, address(row_factors), address(column_factors),
        by_column.data_ptr(), by_row.data_ptr(),
    )  # fmt: skip
    return by_column, by_row, by_row[1].sum().sqrt()


@cache
def _functions(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Build both functions of a dtype."""
    code = machine_code(f"row_sums_{name}", lambda: _module(name))
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    return (
        code("row_sums", pointer, word, word, word, pointer, pointer, pointer),
        code("table_sums", pointer, word, word, word, pointer, pointer, pointer, pointer),
    )


def _module(name: str) -> ir.Module:
    module = ir.Module(f"row_sums_{name}")
    dtype = DTYPES[name]
    assert isinstance(dtype, FloatDtype)
    rows_function(module, dtype)
    table_function(module, dtype)
    return module


def _lanes(code: Code, pointer: Value, dtype: FloatDtype | None, count: Value | None) -> Value:
    """LANES numbers from a pointer, or the first `count` of them and zeros; of float64 without a dtype."""
    kind = _KIND if dtype is None else ir.VectorType(dtype.stored, LANES)
    read = code.load(pointer, kind) if count is None else code.load_first(pointer, kind, count)
    return read if dtype is None else dtype.value(read).widened(F64)


def rows_function(module: ir.Module, dtype: FloatDtype) -> ir.Function:
    """Define `row_sums(x, rows, row_step, columns, factors, squares, found)`."""
    signature = ir.FunctionType(ir.VoidType(), [POINTER, I64, I64, I64, POINTER, POINTER, POINTER])
    code = Code(ir.Function(module, signature, "row_sums"))
    x, rows, row_step, columns, factors, squares, found = code.arguments
    together = 4 if has_feature("avx512vl") else 2  # whose sums fit into the registers
    whole = rows - rows % together
    for first, stop, count in ((code.constant(I64, 0), whole, together), (whole, rows, 1)):
        with code.loop(first, stop, count) as row:
            starts = [code.at(x, (row + number) * row_step, dtype.stored) for number in range(count)]
            zero, nothing = code.constant(_KIND, 0.0), code.constant(F64, 0.0)
            sums = [(code.variable(zero), code.variable(zero), code.variable(nothing)) for _ in starts]

            def add(
                column: Value,
                count: Value | None,
                starts: list[Value] = starts,
                sums: Sequence[tuple[Variable, ...]] = sums,
            ) -> None:
                factor, square = (_lanes(code, code.at(one, column, F64), None, count) for one in (factors, squares))
                for start, (total, weighted, _) in zip(starts, sums, strict=True):
                    value = _lanes(code, code.at(start, column, dtype.stored), dtype, count)
                    total.value = total.value.plus_product(value, factor, exact=True)
                    weighted.value = weighted.value.plus_product(value * value, square, exact=True)

            even = columns - columns % LANES
            with code.loop(code.constant(I64, 0), columns, BLOCK) as begin:
                end = begin + BLOCK
                with code.loop(begin, (end < even).choose(end, even), LANES) as column:
                    add(column, None)
                with code.when((end > even) & (even < columns)):
                    add(even, columns - even)
                for total, _, largest in sums:
                    partial = total.value.total()
                    largest.value = largest.value.larger(partial * partial)
            for number, (total, weighted, largest) in enumerate(sums):
                place = row + number
                in_lanes = (total.value * total.value).total()
                code.store(code.at(found, place, F64), total.value.total())
                code.store(code.at(found, rows + place, F64), weighted.value.total())
                code.store(code.at(found, rows + rows + place, F64), largest.value.larger(in_lanes))
    code.finish()
    return code.function


def table_function(module: ir.Module, dtype: FloatDtype) -> ir.Function:
    """Define `table_sums(x, rows, row_step, columns, row_factors, column_factors, by_column, by_row)`."""
    signature = ir.FunctionType(ir.VoidType(), [POINTER, I64, I64, I64, POINTER, POINTER, POINTER, POINTER])
    code = Code(ir.Function(module, signature, "table_sums"))
    x, rows, row_step, columns, row_factors, column_factors, by_column, by_row = code.arguments
    together = 4 if has_feature("avx512vl") else 2
    whole = rows - rows % together
    for first, stop, count in ((code.constant(I64, 0), whole, together), (whole, rows, 1)):
        with code.loop(first, stop, count) as row:
            starts = [code.at(x, (row + number) * row_step, dtype.stored) for number in range(count)]
            signs = [
                code.spread(code.load(code.at(row_factors, row + number, F64), F64), LANES) for number in range(count)
            ]
            zero = code.constant(_KIND, 0.0)
            sums = [(code.variable(zero), code.variable(zero)) for _ in starts]

            def add(
                column: Value, number_of: Value | None, starts: list[Value] = starts, signs: list[Value] = signs,
                sums: Sequence[tuple[Variable, ...]] = sums,
            ) -> None:  # fmt: skip
                factor = _lanes(code, code.at(column_factors, column, F64), None, number_of)
                places = [code.at(by_column, column + offset, F64) for offset in (code.constant(I64, 0), columns)]
                down, squares = (_lanes(code, place, None, number_of) for place in places)
                for start, sign, (along, weighted) in zip(starts, signs, sums, strict=True):
                    value = _lanes(code, code.at(start, column, dtype.stored), dtype, number_of)
                    square = value * value
                    down = down.plus_product(value, sign, exact=True)
                    squares = squares + square
                    along.value = along.value.plus_product(value, factor, exact=True)
                    weighted.value = weighted.value + square
                for place, one in zip(places, (down, squares), strict=True):
                    if number_of is None:
                        code.store(place, one)
                    else:
                        _store_first(code, place, one, number_of)

            even = columns - columns % LANES
            with code.loop(code.constant(I64, 0), even, LANES) as column:
                for start in starts:
                    code.prefetch(code.at(start, column + row_step * together, dtype.stored))
                add(column, None)
            with code.when(even < columns):
                add(even, columns - even)
            for number, (along, weighted) in enumerate(sums):
                code.store(code.at(by_row, row + number, F64), along.value.total())
                code.store(code.at(by_row, rows + row + number, F64), weighted.value.total())
    code.finish()
    return code.function


def _store_first(code: Code, pointer: Value, value: Value, count: Value) -> None:
    """Write the first `count` lanes."""
    for number, lane in enumerate(value.lanes()):
        with code.when(code.constant(I64, number) < count):
            code.store(code.at(pointer, number, F64), lane)
