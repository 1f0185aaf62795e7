"""The layout of the kernel's state in memory, and the dtypes that it reads."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from traindiff.core.kernels.cpu.code import Code
from traindiff.core.kernels.cpu.values import F32, F64, I32, I64, LANES, Value, element_of, vector
from traindiff.core.shards import BUCKETS
from traindiff.core.summary import SKETCH_SIZE

COUNTS = ("nan", "positive_infinity", "negative_infinity", "zero", "negative", "subnormal")


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the state: its offset in bytes, and the type of its elements."""

    offset: int
    element: ir.Type

    def pointer(self, code: Code, state: Value, index: Value | int = 0) -> Value:
        """Pointer to an element of the field."""
        base = code.at(state, self.offset, ir.IntType(8))
        return code.at(base, index, self.element)

    def vector_pointer(self, code: Code, state: Value, index: Value) -> Value:
        """Pointer to a vector of a field that holds one per bucket."""
        return self.pointer(code, state, index * LANES)


def _layout() -> tuple[dict[str, Field], int]:
    fields: dict[str, Field] = {}
    offset = 0

    def add(name: str, element: ir.Type, count: int) -> None:
        nonlocal offset
        fields[name] = Field(offset, element)
        offset += 8 * count

    for name in COUNTS:
        add(name, I64, 1)
    for name in ("minimum", "maximum", "smallest", "sum"):
        add(name, F64, LANES)
    for name in ("fingerprint", "multiset", "nonfinite"):
        add(name, I64, LANES)
    add("sketch", F64, 2 * SKETCH_SIZE)  # buckets are written rotated by up to 63, and folded at the end
    for axis in ("row", "column"):
        add(f"{axis}_squares", F64, BUCKETS * LANES)
        for number in (F32, F64):  # each in the type in which the dtype is compared; the other stays zero
            add(f"{axis}_largest_{number}", number, BUCKETS * LANES)
    for name in ("row_in_bucket", "row_bucket", "column_bucket", "left", "usual"):
        add(name, I64, 1)
    return fields, offset


FIELDS, SIZE = _layout()
"""Fields of the state by name, and its size in bytes. All fields but the extremes begin as zeros."""

VECTOR_F64 = vector(F64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """A dtype.

    Attributes:
        name: As torch spells it.
        bits: Width of an element.
    """

    name: str
    bits: int

    @property
    def stored(self) -> ir.IntType:
        """Type of an element in memory."""
        return ir.IntType(self.bits)

    @property
    def word(self) -> ir.IntType:
        """Type in which its bits are processed: 32 bits for the shorter dtypes, too."""
        return I64 if self.bits == 64 else I32


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerDtype(Dtype):
    """Integers, and booleans, which are the integers 0 and 1.

    Attributes:
        signed: Whether they are in two's complement.
    """

    signed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatDtype(Dtype):
    """A floating-point dtype.

    Attributes:
        infinity: Bits of +inf; larger magnitudes are NaN.
        smallest_normal: Bits of the smallest normal number.
    """

    infinity: int
    smallest_normal: int

    @property
    def number(self) -> ir.Type:
        """Type in which its values are compared: exact for every value."""
        return F64 if self.bits == 64 else F32

    @property
    def magnitude_mask(self) -> int:
        """All bits but the sign."""
        return (1 << (self.bits - 1)) - 1

    def value(self, raw: Value) -> Value:
        """The number whose bits are `raw` (of the width of `stored`)."""
        if self.name == "bfloat16":
            return (raw.widened(I32) << 16).reinterpreted(F32)
        if self.name == "float16":
            return raw.reinterpreted(ir.HalfType()).widened(F32)
        return raw.reinterpreted(self.number)


_FLOATS = (
    FloatDtype(name="float32", bits=32, infinity=0x7F800000, smallest_normal=0x00800000),
    FloatDtype(name="bfloat16", bits=16, infinity=0x7F80, smallest_normal=0x0080),
    FloatDtype(name="float16", bits=16, infinity=0x7C00, smallest_normal=0x0400),
    FloatDtype(name="float64", bits=64, infinity=0x7FF0000000000000, smallest_normal=0x0010000000000000),
)

_INTEGERS = (
    IntegerDtype(name="bool", bits=8, signed=False),
    IntegerDtype(name="uint8", bits=8, signed=False),
    IntegerDtype(name="int8", bits=8, signed=True),
    IntegerDtype(name="int16", bits=16, signed=True),
    IntegerDtype(name="int32", bits=32, signed=True),
    IntegerDtype(name="int64", bits=64, signed=True),
)

DTYPES: dict[str, FloatDtype | IntegerDtype] = {dtype.name: dtype for dtype in (*_FLOATS, *_INTEGERS)}


def magnitude(value: Value) -> Value:
    """|x|, by clearing the sign bit."""
    wide = element_of(value.type) == F64
    word = I64 if wide else I32
    mask = (1 << 63) - 1 if wide else (1 << 31) - 1
    return (value.reinterpreted(word) & mask).reinterpreted(element_of(value.type))
