"""Row and column profiles: everything that walks the tensor in segments of one row and column bucket."""

from __future__ import annotations

from llvmlite import ir

from traindiff.core.kernels.cpu.code import Code, Variable
from traindiff.core.kernels.cpu.layout import FIELDS, VECTOR_F64, FloatDtype, magnitude
from traindiff.core.kernels.cpu.values import F64, I64, LANES, POINTER, Value, element_of, vector
from traindiff.core.shards import BUCKETS

_SIGNATURE = ir.FunctionType(ir.VoidType(), [POINTER, I64, I64, POINTER, I64, I64, I64])
_PLACE = ("row_in_bucket", "row_bucket", "column_bucket", "left")


def place_function(module: ir.Module) -> ir.Function:
    """Define `void (index, state, columns, row_block, column_block)`: begin at a global index."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64, POINTER, I64, I64, I64]), "place")
    function.linkage = "internal"
    code = Code(function)
    index, state, columns, row_block, column_block = code.arguments
    row, column = index // columns, index % columns
    row_in_bucket, column_bucket = row % row_block, column // column_block
    segment_end = _least((column_bucket + 1) * column_block, columns)
    # With one column bucket a segment goes on until the rows change buckets.
    left = (columns <= column_block).choose((row_block - row_in_bucket) * columns, segment_end) - column
    for name, value in (
        ("row_in_bucket", row_in_bucket),
        ("row_bucket", (row // row_block) & (BUCKETS - 1)),
        ("column_bucket", column_bucket),
        ("left", left),
    ):
        code.store(FIELDS[name].pointer(code, state), value)
    code.finish()
    return function


def profiles_function(module: ir.Module, dtype: FloatDtype) -> ir.Function:
    """Define `void (x, first, stop, state, columns, row_block, column_block)`: accumulate the profiles.

    Goes on from the place that the state holds.
    """
    function = ir.Function(module, _SIGNATURE, f"profiles_{dtype.name}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    code = Code(function)
    x, first, stop, state, columns, row_block, column_block = code.arguments
    place = {name: code.variable(code.load(FIELDS[name].pointer(code, state), I64)) for name in _PLACE}
    zero, none = code.constant(VECTOR_F64, 0.0), code.constant(I64, 0)
    nothing = code.constant(vector(dtype.number), 0.0)
    row_squares, row_largest = code.variable(zero), code.variable(nothing)
    single = columns <= column_block
    here = code.variable(first)
    usual = code.load(FIELDS["usual"].pointer(code, state), I64) > 0

    def add(squares: Value, largest: Value, length: Value) -> None:
        """Add a segment, which begins `here`, to the profiles of its row and column buckets."""
        row_squares.value = row_squares.value + squares
        row_largest.value = row_largest.value.larger(largest)
        _merge(code, state, "column", place["column_bucket"].value, squares, largest)
        here.value = here.value + length

    def end_row() -> None:
        """Go to the next row bucket if the rows of this one have ended."""
        with code.when(place["row_in_bucket"].value >= row_block):
            _merge(code, state, "row", place["row_bucket"].value, row_squares.value, row_largest.value)
            row_squares.value, row_largest.value = zero, nothing
            place["row_in_bucket"].value = none
            place["row_bucket"].value = (place["row_bucket"].value + 1) & (BUCKETS - 1)

    # Most matrices have whole column buckets, of finite numbers. Then no segment is asked where it ends.
    even = usual & single.inverted() & (columns % column_block).equals(0)
    last = (stop < column_block).choose(none, stop - column_block + 1)  # no whole segment begins here or later
    with code.repeat(here, stop):
        with code.when(even & place["left"].value.equals(column_block)), code.repeat(here, last):
            add(*_whole_segment(code, dtype, code.at(x, here.value, dtype.stored), column_block), column_block)
            place["column_bucket"].value = place["column_bucket"].value + 1
            with code.when((place["column_bucket"].value * column_block).equals(columns)):
                place["column_bucket"].value = none
                place["row_in_bucket"].value = place["row_in_bucket"].value + 1
                end_row()
        length = _least(place["left"].value, stop - here.value)
        add(*_segment(code, dtype, code.at(x, here.value, dtype.stored), length, usual), length)
        place["left"].value = place["left"].value - length
        with code.when(place["left"].value.equals(0)):
            _advance(code, place, single, columns, row_block, column_block)
            end_row()
    _merge(code, state, "row", place["row_bucket"].value, row_squares.value, row_largest.value)
    for name, variable in place.items():
        code.store(FIELDS[name].pointer(code, state), variable.value)
    code.finish()
    return function


def _advance(
    code: Code, place: dict[str, Variable], single: Value, columns: Value, row_block: Value, column_block: Value
) -> None:
    """Go to the next segment: the next column bucket, or the next row, or the next row bucket."""
    with code.either(single) as (one, several):
        with one:
            place["row_in_bucket"].value = row_block
            place["left"].value = row_block * columns
        with several:
            bucket = place["column_bucket"].value + 1
            ends = bucket * column_block >= columns
            bucket = ends.choose(code.constant(I64, 0), bucket)
            place["column_bucket"].value = bucket
            place["row_in_bucket"].value = place["row_in_bucket"].value + ends.widened(I64)
            place["left"].value = _least((bucket + 1) * column_block, columns) - bucket * column_block


def _whole_segment(code: Code, dtype: FloatDtype, x: Value, length: Value) -> tuple[Value, Value]:
    """`_segment` of finite elements, of which there are as many as in one or more vectors."""
    kind = vector(dtype.stored)
    long, size = _numbers(dtype, code.load(x, kind), finite=True)
    squares, largest = code.variable(long * long), code.variable(size)
    with code.loop(code.constant(I64, LANES), length, LANES) as start:
        long, size = _numbers(dtype, code.load(code.at(x, start, dtype.stored), kind), finite=True)
        squares.value = squares.value.plus_product(long, long, exact=dtype.bits < 64)
        largest.value = size.larger(largest.value)
    return squares.value, largest.value


def _segment(code: Code, dtype: FloatDtype, x: Value, length: Value, usual: Value) -> tuple[Value, Value]:
    """Sum of squares and largest magnitude per lane over `length` elements.

    Args:
        code: Of the function.
        dtype: Of the elements.
        x: Pointer to the first.
        length: Their number.
        usual: Whether all of them are known to be finite.
    """
    squares = code.variable(code.constant(VECTOR_F64, 0.0))
    largest = code.variable(code.constant(vector(dtype.number), 0.0))

    def take(raw: Value, *, finite: bool = False) -> None:
        long, size = _numbers(dtype, raw, finite=finite)
        squares.value = squares.value.plus_product(long, long, exact=dtype.bits < 64)
        largest.value = size.larger(largest.value)

    kind = vector(dtype.stored)
    whole = length & ~(LANES - 1) & (2**64 - 1)
    with code.either(usual) as (yes, no):
        for branch, finite in ((yes, True), (no, False)):
            with branch, code.loop(code.constant(I64, 0), whole, LANES) as start:
                take(code.load(code.at(x, start, dtype.stored), kind), finite=finite)
    with code.when(whole < length):
        take(code.load_first(code.at(x, whole, dtype.stored), kind, length - whole))
    return squares.value, largest.value


def _numbers(dtype: FloatDtype, raw: Value, *, finite: bool) -> tuple[Value, Value]:
    """Elements in float64, as far as their squares tell, and their magnitudes; 0 for those that are not finite."""
    value = dtype.value(raw)
    size = magnitude(value)
    if finite:
        return value.widened(F64), size
    size = (size < float("inf")).choose(size, 0.0)
    return size.widened(F64), size


def _merge(code: Code, state: Value, axis: str, bucket: Value, squares: Value, largest: Value) -> None:
    place = FIELDS[f"{axis}_squares"].vector_pointer(code, state, bucket)
    code.merge(place, squares, Value.__add__)
    number = element_of(largest.type)
    place = FIELDS[f"{axis}_largest_{number}"].vector_pointer(code, state, bucket)
    code.merge(place, largest, Value.larger)


def _least(left: Value, right: Value) -> Value:
    return (left < right).choose(left, right)
