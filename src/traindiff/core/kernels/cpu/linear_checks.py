"""Checks of the products of a linear layer on the CPU: one call for each product, of whose numbers all else is known.

They compute what `row_sums`, `table_sums` and `row_errors` do.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from llvmlite import ir

from traindiff.core.kernels.cpu.code import Code, machine_code
from traindiff.core.kernels.cpu.layout import DTYPES, FloatDtype
from traindiff.core.kernels.cpu.projection import reads
from traindiff.core.kernels.cpu.row_errors import errors_function
from traindiff.core.kernels.cpu.row_sums import rows_function, table_function
from traindiff.core.kernels.cpu.values import F64, I64, POINTER, Value
from traindiff.core.kernels.row_errors import NUMBERS, Bound, Weights

__all__ = ["OfInput", "Output", "Shape", "reads"]

_COUNTS = 3
SIZE = NUMBERS + _COUNTS


class Shape(NamedTuple):
    """Of a product, all of whose tensors are contiguous.

    Attributes:
        dtype: Of all tensors, as torch spells it.
        rows: Number of rows.
        outputs: Elements of a row of the output.
        inputs: Elements of a row of the input.
        counts: What `row_errors` puts behind its numbers.
    """

    dtype: str
    rows: int
    outputs: int
    inputs: int
    counts: tuple[int, int, int]


class Output:
    """Checks outputs of one shape: `y` against `x Wᵀ + bias`.

    Args:
        shape: The shape; `counts` are those of the output.
        weights: Of the bound of a row.
        of_outputs: Signs of the outputs, float64.
        of_inputs: Signs of the inputs.
    """

    def __init__(self, shape: Shape, weights: Weights, of_outputs: torch.Tensor, of_inputs: torch.Tensor) -> None:
        _, self._rows, self._outputs, self._inputs, counts = shape
        self._kept = of_outputs, of_inputs, torch.ones_like(of_outputs)
        self._sizes = self._rows, self._outputs, self._inputs
        self._signs = [one.data_ptr() for one in self._kept]
        self._weights = array("d", (*weights, *counts))
        self._check = _functions(shape.dtype)[0]
        self._room = SIZE + 2 * self._inputs + _room(self._rows)

    def __call__(self, x: int, weight: int, y: int, bias: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The check, and what the weight gives for that of the gradient of the input; without the interpreter lock.

        Args:
            x: Address of the input.
            weight: Address of the weight.
            y: Address of the output.
            bias: Address of the bias; 0 for none.

        Returns:
            float64, shape (8,); and float64, shape (2 * outputs + 1,): products of the rows of the weight with signs,
            the squares of their norms, and the norm of the weight.
        """
        found = torch.empty(self._room, dtype=torch.float64, device="cpu")
        by_output = torch.empty(2 * self._outputs + 1, dtype=torch.float64, device="cpu")
        self._check(
            x, weight, bias, y, *self._sizes, *self._signs, self._weights.buffer_info()[0], by_output.data_ptr(),
            found.data_ptr(),
        )  # fmt: skip
        return found[:SIZE], by_output


class OfInput:
    """Checks gradients of inputs of one shape: `dx` against `g W`.

    Args:
        shape: The shape; `counts` are those of the gradient of the input.
        weights: Of the bound of a row.
        of_inputs: Signs of the inputs, float64.
    """

    def __init__(self, shape: Shape, weights: Weights, of_inputs: torch.Tensor) -> None:
        _, rows, outputs, inputs, counts = shape
        self._kept = of_inputs, torch.ones_like(of_inputs)
        self._sizes = rows, outputs, inputs
        self._signs = [one.data_ptr() for one in self._kept]
        self._weights = array("d", (*weights, *counts))
        self._check = _functions(shape.dtype)[1]
        self._room = SIZE + _room(rows)

    def __call__(self, gradient: int, by_output: torch.Tensor, of_input: int) -> torch.Tensor:
        """The check, float64, shape (8,).

        Args:
            gradient: Address of the gradient of the output.
            by_output: What `Output` gave.
            of_input: Address of the gradient of the input.
        """
        found = torch.empty(self._room, dtype=torch.float64, device="cpu")
        self._check(
            gradient, of_input, *self._sizes, *self._signs, self._weights.buffer_info()[0], by_output.data_ptr(),
            found.data_ptr(),
        )  # fmt: skip
        return found[:SIZE]


def _room(rows: int) -> int:
    """Numbers of room for work with so many rows."""
    return len(Bound._fields) + _COUNTS + 3 + 7 * rows


@cache
def _functions(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Build both functions of a dtype."""
    code = machine_code(f"linear_checks_{name}", lambda: _module(name))
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    words = [word] * 3
    return (
        code("output", *[pointer] * 4, *words, *[pointer] * 6),
        code("of_input", *[pointer] * 2, *words, *[pointer] * 5),
    )


class _Check:
    """Writes the check of one product.

    Args:
        module: Gets the functions that are called.
        dtype: Of all tensors.
    """

    def __init__(self, module: ir.Module, dtype: FloatDtype) -> None:
        self.rows, self.table = rows_function(module, dtype), table_function(module, dtype)
        self.errors = errors_function(module)

    def write(
        self, code: Code, left: tuple[Value, Value, Value], made: tuple[Value, Value, Value, Value], rows: Value,
        weights: Value, largest: Value, added: Sequence[Value], found: Value,
    ) -> None:  # fmt: skip
        """Write it.

        Args:
            code: The function.
            left: What is multiplied, the length of its rows, and what the other factor gives for their elements.
            made: The product, the length of its rows, their signs, and ones.
            rows: Number of rows.
            weights: Of the bound, and the counts.
            largest: Norm of the other factor.
            added: Sum of what is added to each row, times signs, and its norm.
            found: The numbers, and room for work.
        """
        output, of_added, partial, coherent, most, lost, lost_by_input, *counts = (
            code.load(code.at(weights, number, F64), F64) for number in range(len(Weights._fields) + _COUNTS)
        )
        product, norm = added
        rounded = (norm > 0.0).choose(output, code.constant(F64, 0.0))
        constant = lost + lost_by_input * largest + (of_added + rounded) * norm
        bound = [product, output + rounded, partial, coherent, most, constant, *counts]
        work = code.at(found, rows + SIZE, F64)  # in front of it, `errors` has room
        for number, one in enumerate(bound):
            code.store(code.at(work, number, F64), one)
        sums = code.at(work, len(bound), F64)
        others = code.at(sums, rows * 3, F64)
        x, terms, factors = left
        code.call(self.rows, x, rows, terms, terms, factors, code.at(factors, terms, F64), sums)
        y, columns, signs, ones = made
        code.call(self.rows, y, rows, columns, columns, signs, ones, others)
        code.call(self.errors, sums, others, rows, work, code.constant(I64, _COUNTS), found)


def _module(name: str) -> ir.Module:
    """The LLVM IR."""
    module = ir.Module(f"linear_checks_{name}")
    dtype = DTYPES[name]
    assert isinstance(dtype, FloatDtype)
    check = _Check(module, dtype)
    _output_function(module, check)
    _of_input_function(module, check)
    return module


def _output_function(module: ir.Module, check: _Check) -> None:
    """`output(x, weight, bias, y, rows, outputs, inputs, of_outputs, of_inputs, ones, weights, by_output, found)`."""
    signature = ir.FunctionType(ir.VoidType(), [*[POINTER] * 4, *[I64] * 3, *[POINTER] * 6])
    code = Code(ir.Function(module, signature, "output"))
    x, weight, bias, y, rows, outputs, inputs, of_outputs, of_inputs, ones, weights, by_output, found = code.arguments
    zero, one, nothing = code.constant(I64, 0), code.constant(I64, 1), code.constant(F64, 0.0)
    behind = code.at(found, SIZE, F64)
    by_input = code.at(behind, rows * 7 + (len(Bound._fields) + _COUNTS), F64)
    with code.loop(zero, inputs + inputs, 1) as number:
        code.store(code.at(by_input, number, F64), nothing)
    code.call(check.table, weight, outputs, inputs, inputs, of_outputs, of_inputs, by_input, by_output)
    square, product, norm = code.variable(nothing), code.variable(nothing), code.variable(nothing)
    with code.loop(outputs, outputs + outputs, 1) as number:
        square.add(code.load(code.at(by_output, number, F64), F64))
    largest = code.intrinsic("llvm.sqrt", square.value)
    code.store(code.at(by_output, outputs + outputs, F64), largest)
    with code.when(Value(code, code.builder.ptrtoint(bias.ir, I64)) > 0):
        code.call(check.rows, bias, one, outputs, outputs, of_outputs, ones, behind)
        product.value = code.load(behind, F64)
        norm.value = code.intrinsic("llvm.sqrt", code.load(code.at(behind, 1, F64), F64))
    check.write(
        code, (x, inputs, by_input), (y, outputs, of_outputs, ones), rows, weights, largest,
        (product.value, norm.value), found,
    )  # fmt: skip
    code.finish()


def _of_input_function(module: ir.Module, check: _Check) -> None:
    """`of_input(gradient, of_input, rows, outputs, inputs, of_inputs, ones, weights, by_output, found)`."""
    signature = ir.FunctionType(ir.VoidType(), [*[POINTER] * 2, *[I64] * 3, *[POINTER] * 5])
    code = Code(ir.Function(module, signature, "of_input"))
    gradient, of_input, rows, outputs, inputs, of_inputs, ones, weights, by_output, found = code.arguments
    nothing = code.constant(F64, 0.0)
    largest = code.load(code.at(by_output, outputs + outputs, F64), F64)
    check.write(
        code, (gradient, outputs, by_output), (of_input, inputs, of_inputs, ones), rows, weights, largest,
        (nothing, nothing), found,
    )  # fmt: skip
    code.finish()
