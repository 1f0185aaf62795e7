"""Products of matrices on the CPU with vectors of signs, in one pass at about the speed of memory.

A product with a sign is exact, so only sums round. Columns are taken in blocks of BLOCK. In a block, lane l of LANES
adds up, in float32, the columns l, l + LANES, ... from the block's first one on. Lanes are added up over blocks, and
then to each other, in float64; elements of float64 are added up in float64 throughout. Every machine computes the same
bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from llvmlite import ir

from traindiff.core.kernels.cpu.code import Code, Variable, has_feature, machine_code
from traindiff.core.kernels.cpu.extent import NAMES
from traindiff.core.kernels.cpu.layout import DTYPES, FloatDtype
from traindiff.core.kernels.cpu.values import F32, F64, I64, POINTER, Value
from traindiff.core.kernels.projection import BLOCK, LANES, TOTALS
from traindiff.core.kernels.torch_arrays import address
from traindiff.core.witness import PROBES


def reads(matrix: torch.Tensor) -> bool:
    """True if the kernel can read a matrix where it is: the elements of a row are next to each other."""
    plain = type(matrix) in (torch.Tensor, torch.nn.Parameter)
    return plain and matrix.dtype in NAMES and not matrix.is_neg() and (matrix.shape[1] <= 1 or matrix.stride(1) == 1)


def projected(matrix: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """See `traindiff.core.kernels.projection.projected`; without the interpreter lock."""
    rows, columns = matrix.shape
    found = torch.empty((rows, PROBES), dtype=torch.float64, device="cpu")
    project = _functions(NAMES[matrix.dtype])[0]
    project(address(matrix), rows, matrix.stride(0), columns, address(signs), found.data_ptr())
    return found


def normalized(
    matrix: torch.Tensor, gradient: torch.Tensor, signs: torch.Tensor, *, eps: float, centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `traindiff.core.kernels.projection.normalized`; without the interpreter lock."""
    rows, columns = matrix.shape
    found = torch.empty((rows, PROBES), dtype=torch.float64, device="cpu")
    shift = torch.empty(1, dtype=torch.float64, device="cpu")
    _functions(NAMES[matrix.dtype])[2](
        address(matrix), address(gradient), rows, matrix.stride(0), gradient.stride(0), columns, eps, int(centered),
        address(signs), found.data_ptr(), shift.data_ptr(),
    )  # fmt: skip
    return found, shift[0]


def summed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """See `traindiff.core.kernels.projection.summed`."""
    found = torch.empty(TOTALS, dtype=torch.float64, device="cpu")
    step = PROBES if right.shape[0] == left.shape[0] else 0
    _functions("float64")[1](address(left), address(right), left.shape[0], step, found.data_ptr())
    return found


@cache
def _functions(name: str) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """Build `project(x, rows, row_step, columns, signs, found)`, of a dtype, and `add(left, right, rows, step, found)`.

    The third is `normalized(x, gradient, rows, row_step, gradient_step, columns, eps, centered, signs, found,
    shift)`. The signs of a probe are next to each other, and the products of a row.
    """
    code = machine_code(f"projection_{name}", lambda: _module(name))
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    return (
        code("project", pointer, word, word, word, pointer, pointer),
        code("add", pointer, pointer, word, word, pointer),
        code("normalized", pointer, pointer, *[word] * 4, ctypes.c_double, word, *[pointer] * 3),
    )


def _module(name: str) -> ir.Module:
    """The LLVM IR. On all machines, it does the same to each row."""
    module = ir.Module(f"projection_{name}")
    dtype = DTYPES[name]
    assert isinstance(dtype, FloatDtype)
    _project_function(module, dtype)
    _add_function(module)
    _normalized_function(module, dtype)
    return module


def _project_function(module: ir.Module, dtype: FloatDtype) -> None:
    signature = ir.FunctionType(ir.VoidType(), [POINTER, I64, I64, I64, POINTER, POINTER])
    code = Code(ir.Function(module, signature, "project"))
    x, rows, row_step, columns, signs, found = code.arguments
    # Signs are read once for all rows that are worked on together, whose sums fit into the registers.
    together = 4 if has_feature("avx512vl") else 2
    whole = rows - rows % together
    for first, stop, count in ((code.constant(I64, 0), whole, together), (whole, rows, 1)):
        with code.loop(first, stop, count) as row:
            starts = [code.at(x, (row + number) * row_step, dtype.stored) for number in range(count)]
            _Rows(code, dtype, starts, row_step * together, columns, signs).write(code.at(found, row * PROBES, F64))
    code.finish()


def _add_function(module: ir.Module) -> None:
    signature = ir.FunctionType(ir.VoidType(), [POINTER, POINTER, I64, I64, POINTER])
    code = Code(ir.Function(module, signature, "add"))
    left, right, rows, step, found = code.arguments
    kind = ir.VectorType(F64, PROBES)
    sums, squares, changes, before = (code.variable(code.constant(kind, 0.0)) for _ in range(4))
    with code.loop(code.constant(I64, 0), rows, 1) as row:
        p = code.load(code.at(left, row * PROBES, F64), kind)
        term = p * code.load(code.at(right, row * step, F64), kind)
        change = term - before.value
        sums.add(term)
        squares.add(term * term)
        changes.add(change * change)
        before.value = term
    code.store(found, sums.value)
    for place, one in enumerate((squares, changes), PROBES):
        code.store(code.at(found, place, F64), one.value.total())
    code.finish()


def _normalized_function(module: ir.Module, dtype: FloatDtype) -> None:
    signature = ir.FunctionType(ir.VoidType(), [*[POINTER] * 2, *[I64] * 4, F64, I64, *[POINTER] * 3])
    code = Code(ir.Function(module, signature, "normalized"))
    x, gradient, rows, row_step, gradient_step, columns, eps, centered, signs, found, shift = code.arguments
    count, zero, nothing = columns.to_float(signed=True), code.constant(I64, 0), code.constant(F64, 0.0)
    shifts = code.variable(nothing)
    with code.loop(zero, rows, 1) as row:
        start, other = code.at(x, row * row_step, dtype.stored), code.at(gradient, row * gradient_step, dtype.stored)
        mean = code.variable(nothing)
        with code.when(centered > 0):
            mean.value = _total(code, dtype, start, columns, nothing, squared=False) // count
        square = _total(code, dtype, start, columns, mean.value, squared=True)
        scale = code.constant(F64, 1.0) // code.intrinsic("llvm.sqrt", square // count + eps)
        with code.when(centered > 0):
            far = mean.value * scale
            shifts.add(far * far * _total(code, dtype, other, columns, nothing, squared=True))
        _Rows(code, dtype, [start], row_step, columns, signs, _Normal(other, mean.value, scale)).write(
            code.at(found, row * PROBES, F64)
        )
    code.store(shift, shifts.value)
    code.finish()


def _total(code: Code, dtype: FloatDtype, start: Value, columns: Value, mean: Value, *, squared: bool) -> Value:
    """The sum over a row of the distances from `mean`, or of their squares, in float64."""
    kind, even = ir.VectorType(F64, LANES), columns - columns % LANES
    lanes, rest = code.variable(code.constant(kind, 0.0)), code.variable(code.constant(F64, 0.0))
    for total, first, stop, step in ((lanes, code.constant(I64, 0), even, LANES), (rest, even, columns, 1)):
        with code.loop(first, stop, step) as column:
            stored = ir.VectorType(dtype.stored, LANES) if step > 1 else dtype.stored
            value = dtype.value(code.load(code.at(start, column, dtype.stored), stored)).widened(F64) - mean
            total.add(value * value if squared else value)
    return lanes.value.total() + rest.value


class _Normal(NamedTuple):
    """What makes terms of a row that is normalized and multiplied by the elements of another one.

    Attributes:
        other: Pointer to the other row.
        mean: Mean that is subtracted.
        scale: What multiplies the difference.
    """

    other: Value
    mean: Value
    scale: Value


class _Rows:
    """Writes the products of some rows.

    Args:
        code: The function.
        dtype: Of the elements.
        starts: Pointers to the first element of each row.
        ahead: Elements from one of these rows to the one that is worked on next in its place: it is fetched meanwhile.
        columns: Number of columns.
        signs: Pointer to the signs.
        normal: If given, the only row is normalized by it.
    """

    def __init__(
        self, code: Code, dtype: FloatDtype, starts: list[Value], ahead: Value, columns: Value, signs: Value,
        normal: _Normal | None = None,
    ) -> None:  # fmt: skip
        self._code = code
        self._dtype = dtype
        self._starts = starts
        self._ahead = ahead
        self._columns = columns
        self._signs = signs
        self._normal = normal

    def write(self, found: Value) -> None:
        """Write them to a pointer."""
        code, columns = self._code, self._columns
        totals = self._zeros(F64)
        whole = columns - columns % LANES
        with code.loop(code.constant(I64, 0), columns, BLOCK) as first:
            sums, stop = self._zeros(self._dtype.number), first + BLOCK
            with code.loop(first, (stop < whole).choose(stop, whole), LANES) as column:
                for start in self._starts:
                    code.prefetch(code.at(start, column + self._ahead, self._dtype.stored))
                self._add(column, sums, None)
            with code.when((stop > whole) & (whole < columns)):
                self._add(whole, sums, columns - whole)
            for total, one in zip(totals, sums, strict=True):
                total.add(one.value.widened(F64))
        for place, total in enumerate(totals):
            code.store(code.at(found, place, F64), total.value.total())

    def _zeros(self, element: ir.Type) -> list[Variable]:
        """Sums of lanes for each row and probe."""
        zero = self._code.constant(ir.VectorType(element, LANES), 0.0)
        return [self._code.variable(zero) for _ in range(len(self._starts) * PROBES)]

    def _add(self, column: Value, sums: list[Variable], count: Value | None) -> None:
        """Add LANES columns, or `count` of them."""
        code, dtype = self._code, self._dtype

        def read(pointer: Value, element: ir.Type) -> Value:
            kind = ir.VectorType(element, LANES)
            return code.load(pointer, kind) if count is None else code.load_first(pointer, kind, count)

        places = [code.at(self._signs, column + self._columns * probe, dtype.number) for probe in range(PROBES)]
        signs = [read(place, dtype.number) for place in places]
        held = iter(sums)
        for start in self._starts:
            value = dtype.value(read(code.at(start, column, dtype.stored), dtype.stored))
            if self._normal is not None:  # lanes behind the last column have the gradient 0
                other, mean, scale = self._normal
                normal = (value.widened(F64) - mean) * scale
                factor = dtype.value(read(code.at(other, column, dtype.stored), dtype.stored))
                value = (normal if dtype.number == F64 else normal.shortened(F32)) * factor
            for sign in signs:
                one = next(held)
                one.value = one.value.plus_product(value, sign, exact=True)
