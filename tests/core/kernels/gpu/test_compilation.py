"""The kernels compile for real GPUs, which needs none: what the interpreter forgives, the compiler does not."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from traindiff.core.kernels.gpu import launch
from traindiff.core.kernels.gpu.layout import DTYPES

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"
)
HOPPER = GPUTarget("cuda", 90, 32)
AMPERE = GPUTarget("cuda", 80, 32)


def compiled(kernel: Any, target: GPUTarget, **constants: Any) -> Any:
    signature = {
        parameter.name: "constexpr" if parameter.is_constexpr else parameter.annotation_type
        for parameter in kernel.params
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(kernel, signature, places), target=target, options={"num_warps": 4})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64])
def test_one_tensor(dtype: torch.dtype) -> None:
    assert "ptx" in compiled(launch.one_kernel, HOPPER, box=False, **launch._constants(DTYPES[dtype])).asm


@pytest.mark.parametrize("target", [AMPERE, HOPPER], ids=str)
def test_many_tensors_and_merging(target: GPUTarget) -> None:
    constants = launch._constants(DTYPES[torch.float32])
    assert "ptx" in compiled(launch.many_kernel, target, box=True, **constants).asm
    assert "ptx" in compiled(launch.merge_kernel, target).asm


def test_subnormals_are_not_flushed_to_zero() -> None:
    constants = launch._constants(DTYPES[torch.float32])
    assert ".ftz" not in compiled(launch.one_kernel, HOPPER, box=False, **constants).asm["ptx"]


def test_nothing_is_atomic() -> None:
    for kernel in (launch.one_kernel, launch.many_kernel):
        constants = launch._constants(DTYPES[torch.float32])
        assert "atom" not in compiled(kernel, HOPPER, box=False, **constants).asm["ptx"]
