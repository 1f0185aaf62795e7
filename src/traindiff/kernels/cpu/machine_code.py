"""Machine code for this host, made of LLVM IR. No compiler is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

_engines: dict[str, Any] = {}
"""What owns the memory of the code, by the name of its module: kept as long as the process."""


def host() -> str:
    """The processor for which functions are built."""
    name: str = llvm.get_host_cpu_name()
    return name


def machine_code(name: str, build: Callable[[], ir.Module]) -> Callable[..., Any]:
    """Build a module where that has not been done: a tenth of a second or two, once per process.

    Args:
        name: What the module is filed under.
        build: Makes it.

    Returns:
        Gives a function of the module by its name and the ctypes of its arguments; it returns nothing.
    """
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
