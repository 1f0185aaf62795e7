"""LLVM IR that reads like the arithmetic it does: values with operators, variables, loops."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from traindiff.core.kernels.cpu.values import I1, I32, I64, LANES, POINTER, Operand, Value, element_of

_engines: dict[str, Any] = {}
"""Owners of the code's memory by name of the module; they live as long as the process."""

_building = threading.Lock()
"""Held while a module is built: of two engines of one name, the first would take its code along when it is replaced."""


def host() -> str:
    """The processor for which functions are built."""
    name: str = llvm.get_host_cpu_name()
    return name


def has_feature(name: str) -> bool:
    """True if the processor has these instructions, as LLVM calls them."""
    return bool(llvm.get_host_cpu_features().get(name, False))


def machine_code(name: str, build: Callable[[], ir.Module]) -> Callable[..., Any]:
    """Build a module, once per process and name; takes 0.1 to 0.2 s.

    Returns:
        A function that returns a function of the module, by its name and the ctypes of its arguments. That function
        returns nothing.
    """
    with _building:
        if name not in _engines:
            _engines[name] = _engine(build())
        engine = _engines[name]
    return lambda function, *arguments: ctypes.CFUNCTYPE(None, *arguments)(engine.get_function_address(function))


def _engine(module: ir.Module) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=host(), features=features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine


class Variable:
    """A number in a register that changes; `code.variable` makes one."""

    __slots__ = ("_place", "code")

    def __init__(self, code: Code, kind: ir.Type) -> None:
        self.code = code
        with code.builder.goto_entry_block():
            self._place = code.builder.alloca(kind)

    @property
    def value(self) -> Value:
        """The current value of the variable."""
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
        """Combine `value` with the one in memory.

        Of a comparison and a choice that goes back to where it was read LLVM makes a masked store, which takes a
        processor without AVX-512 some 13 cycles. A fence between them, which is no instruction, keeps it from that.
        """
        combined = combine(self.load(pointer, value.type), value)
        self.store(pointer, self.intrinsic("llvm.arithmetic.fence", combined) if combined.is_float else combined)

    def load_first(self, pointer: Value, kind: ir.VectorType, count: Value) -> Value:
        """Read the first `count` lanes; the others are zero and their memory is not touched."""
        lanes = self.constants(I32, range(kind.count))
        mask = lanes < self.spread(count.narrowed(I32), kind.count)
        suffix = f"v{kind.count}{_short(kind.element)}"
        signature = ir.FunctionType(kind, [POINTER, I32, ir.VectorType(I1, kind.count), kind])
        masked_load = self._declared(f"llvm.masked.load.{suffix}.p0", signature)
        align = ir.Constant(I32, _bytes(kind.element))
        nothing = ir.Constant(kind, [ir.Constant(kind.element, 0)] * kind.count)
        return Value(self, self.builder.call(masked_load, [pointer.ir, align, mask.ir, nothing]))

    def prefetch(self, pointer: Value) -> None:
        """Bring memory that will be read soon into the second-level cache; the address need not exist."""
        function = self._declared("llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32]))
        for_reading, second_level, data = (ir.Constant(I32, number) for number in (0, 2, 1))
        self.builder.call(function, [pointer.ir, for_reading, second_level, data])

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
    def when(self, condition: Value) -> Iterator[None]:
        """Run the body only where `condition` holds."""
        with self.builder.if_then(condition.ir):
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
