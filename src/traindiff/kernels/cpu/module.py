"""The CPU kernel as a whole: one function per dtype, built for the host at first use."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from traindiff.kernels.cpu.blocks import blocks_function, elements_function
from traindiff.kernels.cpu.code import F32, F64, I64, POINTER, Code, Value, vector
from traindiff.kernels.cpu.dtypes import FLOATS, FloatDtype
from traindiff.kernels.cpu.profiles import place_function, profiles_function
from traindiff.kernels.cpu.state import COUNTS, FIELDS, SIZE
from traindiff.kernels.hashing import BLOCK
from traindiff.shard import BUCKETS
from traindiff.summary import SKETCH_SIZE, SUMMARY

CHUNK = 32 * BLOCK
"""Elements that are read from memory once and then found in the first-level cache: 8 kB of float32."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The compiled functions. `engine` owns their memory.

    Attributes:
        add: By dtype, `add(x, runs, length, x_step, index, index_step, columns, row_block, column_block,
            state)`: accumulate `runs` runs of `length` contiguous elements. Run r begins `r * x_step`
            elements after `x`, at global index `index + r * index_step`.
        finish: `finish(state, summary, count)`: write the state as a SUMMARY of `count` elements.
        begin: `begin(state)`: an empty state.
        host: The processor it was built for.
    """

    add: dict[str, Any]
    finish: Any
    begin: Any
    host: str
    engine: Any


@cache
def kernel() -> Kernel:
    """Build the kernel for this machine: about half a second, once per process. No compiler is needed."""
    module = build_module()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    host, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=host, features=features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        parsed, llvm.create_pass_builder(machine, options)
    )
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    word, pointer = ctypes.c_int64, ctypes.c_void_p
    add = ctypes.CFUNCTYPE(None, pointer, word, word, word, word, word, word, word, word, pointer)
    return Kernel(
        add={dtype.name: add(engine.get_function_address(f"add_{dtype.name}")) for dtype in FLOATS},
        finish=ctypes.CFUNCTYPE(None, pointer, pointer, word)(engine.get_function_address("finish")),
        begin=ctypes.CFUNCTYPE(None, pointer)(engine.get_function_address("begin")),
        host=host,
        engine=engine,
    )


def build_module() -> ir.Module:
    """The LLVM IR of all functions, the same for every machine."""
    module = ir.Module("traindiff")
    place = place_function(module)
    for dtype in FLOATS:
        _add_function(module, dtype, place)
    _begin_function(module)
    _finish_function(module)
    return module


def _add_function(module: ir.Module, dtype: FloatDtype, place: ir.Function) -> None:
    blocks, elements = blocks_function(module, dtype), elements_function(module, dtype)
    profiles = profiles_function(module, dtype)
    signature = ir.FunctionType(ir.VoidType(), [POINTER, *[I64] * 8, POINTER])
    code = Code(ir.Function(module, signature, f"add_{dtype.name}"))
    base, runs, length, x_step, index, index_step, columns, row_block, column_block, state = code.arguments
    zero = code.constant(I64, 0)
    grid = (columns, row_block, column_block)
    with code.loop(zero, runs, 1) as run:
        x = code.at(base, run * x_step, dtype.stored)
        start = index + run * index_step
        code.call(place, start, state, *grid)
        # Up to the next block, whole blocks in chunks that stay in the cache, and the rest.
        ahead = (zero - start) & (BLOCK - 1)
        head = (ahead < length).choose(ahead, length)
        body = head + (((length - head) >> 6) << 6)
        code.call(elements, x, zero, head, start, state)
        code.call(profiles, x, zero, head, state, *grid)
        with code.loop(head, body, CHUNK) as first:
            end = first + CHUNK
            stop = (end < body).choose(end, body)
            code.call(blocks, x, first, stop, (start + first) >> 6, state)
            code.call(profiles, x, first, stop, state, *grid)
        code.call(elements, x, body, length, start + body, state)
        code.call(profiles, x, body, length, state, *grid)
    code.finish()


def _begin_function(module: ir.Module) -> None:
    code = Code(ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "begin"))
    (state,) = code.arguments
    with code.loop(code.constant(I64, 0), code.constant(I64, SIZE // 8), 1) as word:
        code.store(code.at(state, word, I64), code.constant(I64, 0))
    for name, value in (("minimum", float("inf")), ("maximum", float("-inf")), ("smallest", float("inf"))):
        code.store(FIELDS[name].pointer(code, state), code.constant(vector(F64), value))
    code.finish()


def _finish_function(module: ir.Module) -> None:
    code = Code(ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, POINTER, I64]), "finish"))
    state, summary, count = code.arguments

    def out(name: str, index: Value | int = 0) -> Value:
        assert SUMMARY.fields is not None
        start = code.at(summary, SUMMARY.fields[name][1], ir.IntType(8))
        return code.at(start, index, I64)  # every number of a SUMMARY has 8 bytes

    def lanes(name: str, bucket: Value | int = 0) -> Value:
        field = FIELDS[name]
        index = bucket if isinstance(bucket, Value) else code.constant(I64, bucket)
        return code.load(field.vector_pointer(code, state, index), vector(field.element))

    code.store(out("count"), count)
    for name in COUNTS:
        code.store(out(name), code.load(FIELDS[name].pointer(code, state), I64))
    for name in ("sum", "fingerprint", "multiset", "nonfinite"):
        code.store(out(name), lanes(name).total())
    code.store(out("minimum"), lanes("minimum").least())
    code.store(out("maximum"), lanes("maximum").greatest())
    code.store(out("smallest"), lanes("smallest").least())
    zero = code.constant(I64, 0)
    with code.loop(zero, code.constant(I64, SKETCH_SIZE), 1) as bucket:
        low = code.load(FIELDS["sketch"].pointer(code, state, bucket), F64)
        high = code.load(FIELDS["sketch"].pointer(code, state, bucket + SKETCH_SIZE), F64)
        code.store(out("sketch", bucket), low + high)
    squares = code.variable(code.constant(F64, 0.0))
    with code.loop(zero, code.constant(I64, BUCKETS), 1) as bucket:
        row = lanes("row_squares", bucket).total()
        squares.value = squares.value + row
        code.store(out("row_squares", bucket), row)
        code.store(out("column_squares", bucket), lanes("column_squares", bucket).total())
        for axis in ("row", "column"):
            short = lanes(f"{axis}_largest_{F32}", bucket).widened(F64)
            code.store(out(f"{axis}_largest", bucket), lanes(f"{axis}_largest_{F64}", bucket).larger(short).greatest())
    code.store(out("sum_of_squares"), squares.value)
    code.finish()
