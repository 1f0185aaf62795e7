"""Numbers in registers, while code is written: scalars, and vectors of LANES entries whatever the machine has.

LLVM splits vectors into the registers of the host, so that the generated code, and with it the order of every
floating-point operation, is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llvmlite import ir

if TYPE_CHECKING:
    from traindiff.core.kernels.cpu.code import Code

LANES = 16
"""Elements that are worked on together."""

I1, I32, I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
F32, F64 = ir.FloatType(), ir.DoubleType()
POINTER = ir.PointerType()


def vector(element: ir.Type) -> ir.VectorType:
    """The type of LANES elements."""
    return ir.VectorType(element, LANES)


def element_of(kind: ir.Type) -> ir.Type:
    """The scalar type of a scalar or vector type."""
    return kind.element if isinstance(kind, ir.VectorType) else kind


class Value:
    """A number or vector of numbers, with the operators of its type (integers are unsigned)."""

    __slots__ = ("code", "ir")

    def __init__(self, code: Code, value: Any) -> None:
        self.code = code
        self.ir = value

    @property
    def type(self) -> ir.Type:
        """Its LLVM type."""
        return self.ir.type

    @property
    def is_vector(self) -> bool:
        """True if it has lanes."""
        return isinstance(self.type, ir.VectorType)

    @property
    def is_float(self) -> bool:
        """True if it is a floating-point number, or a vector of them."""
        return not isinstance(element_of(self.type), ir.IntType)

    def _binary(self, other: Operand, integer: str, floating: str) -> Value:
        operation = getattr(self.code.builder, floating if self.is_float else integer)
        return Value(self.code, operation(self.ir, self.code.like(self, other).ir))

    def __add__(self, other: Operand) -> Value:
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: Operand) -> Value:
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other: Operand) -> Value:
        return self._binary(other, "mul", "fmul")

    def __and__(self, other: Operand) -> Value:
        return self._binary(other, "and_", "and_")

    def __or__(self, other: Operand) -> Value:
        return self._binary(other, "or_", "or_")

    def __xor__(self, other: Operand) -> Value:
        return self._binary(other, "xor", "xor")

    def __rshift__(self, other: Operand) -> Value:
        return self._binary(other, "lshr", "lshr")

    def __lshift__(self, other: Operand) -> Value:
        return self._binary(other, "shl", "shl")

    def __floordiv__(self, other: Operand) -> Value:
        return self._binary(other, "udiv", "fdiv")

    def __mod__(self, other: Operand) -> Value:
        return self._binary(other, "urem", "frem")

    def __neg__(self) -> Value:
        return Value(self.code, self.code.builder.fneg(self.ir))

    def _compare(self, how: str, other: Operand) -> Value:
        builder, right = self.code.builder, self.code.like(self, other).ir
        compare = builder.fcmp_ordered if self.is_float else builder.icmp_unsigned
        return Value(self.code, compare(how, self.ir, right))

    def __lt__(self, other: Operand) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Operand) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Operand) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Operand) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Operand) -> Value:
        """Element-wise equality."""
        return self._compare("==", other)

    def inverted(self) -> Value:
        """All bits flipped."""
        return Value(self.code, self.code.builder.not_(self.ir))

    def choose(self, yes: Operand, no: Operand) -> Value:
        """`yes` where this mask is set, else `no`; at least one of them is a Value."""
        model = yes if isinstance(yes, Value) else no
        assert isinstance(model, Value)
        left, right = (self.code.like(model, side).ir for side in (yes, no))
        return Value(self.code, self.code.builder.select(self.ir, left, right))

    def smaller(self, other: Value) -> Value:
        """The smaller one of two; `other` where this is NaN."""
        return (self < other).choose(self, other)

    def larger(self, other: Value) -> Value:
        """The larger one of two; `other` where this is NaN."""
        return (self > other).choose(self, other)

    def _cast(self, element: ir.Type, how: str) -> Value:
        kind = ir.VectorType(element, self.type.count) if isinstance(self.type, ir.VectorType) else element
        return self if kind == self.type else Value(self.code, getattr(self.code.builder, how)(self.ir, kind))

    def widened(self, element: ir.Type) -> Value:
        """Integers zero-extended, floats made longer, exactly."""
        return self._cast(element, "fpext" if self.is_float else "zext")

    def sign_extended(self, element: ir.Type) -> Value:
        """Integers made longer, with copies of the first bit: a mask becomes all ones or zero."""
        return self._cast(element, "sext")

    def shortened(self, element: ir.Type) -> Value:
        """Floats rounded to a shorter type."""
        return self._cast(element, "fptrunc")

    def narrowed(self, element: ir.Type) -> Value:
        """Integers cut to their low bits."""
        return self._cast(element, "trunc")

    def reinterpreted(self, element: ir.Type) -> Value:
        """The same bits as another type of the same width."""
        return self._cast(element, "bitcast")

    def halves(self) -> tuple[Value, Value]:
        """Of a vector with 32-bit lanes: the even ones and the odd ones as i64, where they are."""
        pairs = Value(self.code, self.code.builder.bitcast(self.ir, ir.VectorType(I64, LANES // 2)))
        return pairs & 0xFFFFFFFF, pairs >> 32

    def plus_product(self, left: Value, right: Value, *, exact: bool) -> Value:
        """`self + left * right`; where the product is `exact`, fused or not is the same."""
        flags = ("contract",) if exact else ()
        product = self.code.builder.fmul(left.ir, right.ir, flags=flags)
        return Value(self.code, self.code.builder.fadd(self.ir, product, flags=flags))

    def to_float(self, *, signed: bool) -> Value:
        """Integers as float64, rounded to nearest."""
        return self._cast(F64, "sitofp" if signed else "uitofp")

    def count(self) -> Value:
        """How many lanes of a mask are set, as i64."""
        if not self.is_vector:
            return self.widened(I64)
        bits = Value(self.code, self.code.builder.bitcast(self.ir, ir.IntType(LANES)))
        return self.code.intrinsic("llvm.ctpop", bits).widened(I64)

    def any(self) -> Value:
        """True if a lane of a mask is set."""
        if not self.is_vector:
            return self
        bits = Value(self.code, self.code.builder.bitcast(self.ir, ir.IntType(LANES)))
        return bits > 0

    def lanes(self) -> Iterator[Value]:
        """The entries of a vector, first to last; a scalar has itself."""
        if not self.is_vector:
            yield self
            return
        for lane in range(self.type.count):
            yield Value(self.code, self.code.builder.extract_element(self.ir, ir.Constant(I32, lane)))

    def total(self) -> Value:
        """Sum of the lanes: neighbors first, then pairs of neighbors, as a tree of fixed shape."""
        return self._tree(Value.__add__)

    def least(self) -> Value:
        """Smallest lane."""
        return self._tree(Value.smaller)

    def greatest(self) -> Value:
        """Largest lane."""
        return self._tree(Value.larger)

    def _tree(self, combine: Any) -> Value:
        level = list(self.lanes())
        while len(level) > 1:
            level = [combine(even, odd) for even, odd in zip(level[::2], level[1::2], strict=True)]
        return level[0]


Operand = Value | int | float
