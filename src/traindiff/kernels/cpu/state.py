"""What the kernel accumulates: a struct in memory, one vector per number, summed up at the end."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from traindiff.kernels.cpu.code import Code
from traindiff.kernels.cpu.values import F32, F64, I64, LANES, Value, vector
from traindiff.shards import BUCKETS
from traindiff.summary import SKETCH_SIZE

COUNTS = ("nan", "positive_infinity", "negative_infinity", "zero", "negative", "subnormal")


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the state: where it begins, in bytes, and what it is made of."""

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
    for name in ("row_in_bucket", "row_bucket", "column_bucket", "left"):
        add(name, I64, 1)
    return fields, offset


FIELDS, SIZE = _layout()
"""Fields of the state by name, and its size in bytes. Zero bytes are its initial content but for extremes."""

VECTOR_F64 = vector(F64)
