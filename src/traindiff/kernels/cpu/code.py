"""LLVM IR that reads like the arithmetic it does: values with operators, variables, loops.

A `Value` is a scalar or a vector in a register. Vectors have LANES entries whatever the machine has;
LLVM splits them into the registers of the host, so that the generated code, and with it the order of
every floating-point operation, is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

LANES = 16
"""Elements that are worked on together."""

I1, I32, I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
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
        """Whether it has lanes."""
        return isinstance(self.type, ir.VectorType)

    @property
    def _is_float(self) -> bool:
        return not isinstance(element_of(self.type), ir.IntType)

    def _binary(self, other: Operand, integer: str, floating: str) -> Value:
        operation = getattr(self.code.builder, floating if self._is_float else integer)
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
        compare = builder.fcmp_ordered if self._is_float else builder.icmp_unsigned
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

    def below_zero(self) -> Value:
        """Whether the sign bit of an integer is set."""
        zero = self.code.like(self, 0).ir
        return Value(self.code, self.code.builder.icmp_signed("<", self.ir, zero))

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
        kind = vector(element) if isinstance(self.type, ir.VectorType) else element
        return self if kind == self.type else Value(self.code, getattr(self.code.builder, how)(self.ir, kind))

    def widened(self, element: ir.Type) -> Value:
        """Integers zero-extended, floats made longer, exactly."""
        return self._cast(element, "fpext" if self._is_float else "zext")

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

    def plus_square(self, other: Value, *, exact: bool) -> Value:
        """`self + other * other`; where the square is `exact`, fused or not is the same."""
        flags = ("contract",) if exact else ()
        square = self.code.builder.fmul(other.ir, other.ir, flags=flags)
        return Value(self.code, self.code.builder.fadd(self.ir, square, flags=flags))

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
        """Whether a lane of a mask is set."""
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
        """Sum of the lanes: neighbours first, then pairs of neighbours, as a tree of fixed shape."""
        return self._tree(lambda left, right: left + right)

    def least(self) -> Value:
        """Smallest lane."""
        return self._tree(lambda left, right: left.smaller(right))

    def greatest(self) -> Value:
        """Largest lane."""
        return self._tree(lambda left, right: left.larger(right))

    def _tree(self, combine: Any) -> Value:
        level = list(self.lanes())
        while len(level) > 1:
            level = [combine(left, right) for left, right in zip(level[::2], level[1::2], strict=True)]
        return level[0]


Operand = Value | int | float


class Variable:
    """A number in a register that changes; `code.variable` makes one."""

    __slots__ = ("_place", "code")

    def __init__(self, code: Code, kind: ir.Type) -> None:
        self.code = code
        with code.builder.goto_entry_block():
            self._place = code.builder.alloca(kind)

    @property
    def value(self) -> Value:
        """What it holds now."""
        return Value(self.code, self.code.builder.load(self._place))

    @value.setter
    def value(self, value: Value) -> None:
        self.code.builder.store(value.ir, self._place)

    def add(self, value: Operand) -> None:
        """Increase it."""
        self.value = self.value + value


class Code:
    """Writes the body of one function.

    Args:
        function: An LLVM function without blocks; `arguments` are its arguments as values.
    """

    def __init__(self, function: ir.Function) -> None:
        self.function = function
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        body = function.append_basic_block("body")
        self.builder.branch(body)  # so that variables can always be made in the entry block
        self.builder.position_at_end(body)
        self.arguments = [Value(self, argument) for argument in function.args]

    def constant(self, kind: ir.Type, number: float) -> Value:
        """A scalar, or a vector of equal numbers."""
        if isinstance(kind, ir.VectorType):
            return Value(self, ir.Constant(kind, [ir.Constant(kind.element, number)] * kind.count))
        return Value(self, ir.Constant(kind, number))

    def constants(self, element: ir.Type, numbers: Any) -> Value:
        """A vector of the given numbers."""
        listed = [ir.Constant(element, number) for number in numbers]
        return Value(self, ir.Constant(ir.VectorType(element, len(listed)), listed))

    def like(self, model: Value, operand: Operand) -> Value:
        """`operand` as a value of the type of `model`: numbers become constants, scalars are spread."""
        if not isinstance(operand, Value):
            return self.constant(model.type, operand)
        if isinstance(model.type, ir.VectorType) and not isinstance(operand.type, ir.VectorType):
            return self.spread(operand, model.type.count)
        return operand

    def spread(self, scalar: Value, lanes: int = LANES) -> Value:
        """A vector with `scalar` in every lane."""
        kind = ir.VectorType(scalar.type, lanes)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar.ir, ir.Constant(I32, 0))
        mask = ir.Constant(ir.VectorType(I32, lanes), [ir.Constant(I32, 0)] * lanes)
        return Value(self, self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), mask))

    def variable(self, initial: Value) -> Variable:
        """A variable that holds `initial`."""
        made = Variable(self, initial.type)
        made.value = initial
        return made

    def at(self, base: Value, index: Operand, element: ir.Type) -> Value:
        """Pointer to the index-th element from `base`."""
        offset = index if isinstance(index, Value) else self.constant(I64, index)
        return Value(self, self.builder.gep(base.ir, [offset.ir], source_etype=element))

    def load(self, pointer: Value, kind: ir.Type) -> Value:
        """Read a scalar or vector; aligned to its elements only."""
        return Value(self, self.builder.load(pointer.ir, align=_bytes(element_of(kind)), typ=kind))

    def store(self, pointer: Value, value: Value) -> None:
        """Write a scalar or vector; aligned to its elements only."""
        self.builder.store(value.ir, pointer.ir, align=_bytes(element_of(value.type)))

    def merge(self, pointer: Value, value: Value, combine: Callable[[Value, Value], Value]) -> None:
        """Combine `value` with the one in memory."""
        self.store(pointer, combine(self.load(pointer, value.type), value))

    def load_first(self, pointer: Value, kind: ir.VectorType, count: Value) -> Value:
        """Read the first `count` lanes; the others are zero and their memory is not touched."""
        lanes = self.constants(I32, range(LANES))
        mask = lanes < self.spread(count.narrowed(I32))
        suffix = f"v{LANES}{_short(kind.element)}"
        signature = ir.FunctionType(kind, [POINTER, I32, vector(I1), kind])
        masked_load = self._declared(f"llvm.masked.load.{suffix}.p0", signature)
        align = ir.Constant(I32, _bytes(kind.element))
        nothing = ir.Constant(kind, [ir.Constant(kind.element, 0)] * LANES)
        return Value(self, self.builder.call(masked_load, [pointer.ir, align, mask.ir, nothing]))

    def intrinsic(self, name: str, value: Value) -> Value:
        """Result of the LLVM intrinsic `name`, which maps a type to itself."""
        kind = value.type
        short = f"v{LANES}{_short(kind.element)}" if isinstance(kind, ir.VectorType) else _short(kind)
        function = self._declared(f"{name}.{short}", ir.FunctionType(kind, [kind]))
        return Value(self, self.builder.call(function, [value.ir]))

    def call(self, function: ir.Function, *arguments: Value) -> None:
        """Run a function of the same module that returns nothing."""
        self.builder.call(function, [argument.ir for argument in arguments])

    @contextmanager
    def loop(self, first: Value, stop: Value, step: int) -> Iterator[Value]:
        """Repeat the body for `first`, `first + step`, ... below `stop`."""
        with self.repeat(counter := self.variable(first), stop):
            yield counter.value
            counter.value = counter.value + step

    @contextmanager
    def repeat(self, counter: Variable, stop: Value) -> Iterator[None]:
        """Repeat the body, which moves `counter`, as long as it is below `stop`."""
        test, body, after = (self.function.append_basic_block(name) for name in ("test", "loop", "after"))
        self.builder.branch(test)
        self.builder.position_at_end(test)
        self.builder.cbranch((counter.value < stop).ir, body, after)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(test)
        self.builder.position_at_end(after)

    @contextmanager
    def when(self, condition: Value, *, likely: bool | None = None) -> Iterator[None]:
        """Run the body only where `condition` holds."""
        with self.builder.if_then(condition.ir, likely=likely):
            yield

    @contextmanager
    def either(self, condition: Value, *, likely: bool | None = None) -> Iterator[tuple[Any, Any]]:
        """Two bodies, as in `with code.either(c) as (yes, no)`: the first runs where `condition` holds."""
        with self.builder.if_else(condition.ir, likely=likely) as branches:
            yield branches

    def finish(self) -> None:
        """End the function."""
        self.builder.ret_void()

    def _declared(self, name: str, signature: ir.FunctionType) -> ir.Function:
        module = self.function.module
        return module.globals.get(name) or ir.Function(module, signature, name)


def _bytes(element: ir.Type) -> int:
    return {"half": 2, "float": 4, "double": 8, "ptr": 8}.get(str(element)) or max(1, element.width // 8)


def _short(element: ir.Type) -> str:
    return {"half": "f16", "float": "f32", "double": "f64"}.get(str(element), str(element))
