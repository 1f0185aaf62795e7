"""The kernels compile for real GPUs, which needs none: what the interpreter forgives, the compiler does not."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from traindiff.core.kernels.gpu import contribution, launch, product_errors, projection
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


def constants_of(dtype: torch.dtype) -> dict[str, Any]:
    names = "form", "bits", "infinity", "first_nan", "smallest_normal"
    return dict(zip(names, launch._constants(DTYPES[dtype]), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64])
def test_one_tensor(dtype: torch.dtype) -> None:
    assert "ptx" in compiled(launch.one_kernel, HOPPER, box=False, **constants_of(dtype)).asm


@pytest.mark.parametrize("target", [AMPERE, HOPPER], ids=str)
def test_many_tensors_and_merging(target: GPUTarget) -> None:
    constants = constants_of(torch.float32)
    assert "ptx" in compiled(launch.many_kernel, target, box=True, **constants).asm
    assert "ptx" in compiled(launch.merge_kernel, target).asm


def test_subnormals_are_not_flushed_to_zero() -> None:
    constants = constants_of(torch.float32)
    assert ".ftz" not in compiled(launch.one_kernel, HOPPER, box=False, **constants).asm["ptx"]


def test_nothing_is_atomic() -> None:
    for kernel in (launch.one_kernel, launch.many_kernel):
        constants = constants_of(torch.float32)
        assert "atom" not in compiled(kernel, HOPPER, box=False, **constants).asm["ptx"]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_the_witness_is_compiled_without_atomics(kind: str) -> None:
    of_witness: tuple[tuple[Any, dict[str, Any]], ...] = (
        (projection.projected_kernel, {"height": 16, "width": 256, "kind": kind}),
        (projection.normalized_kernel, {
            "height": 16, "width": 256, "centered": True, "kind": kind, "of_gradient": "float32",
        }),
        (projection.summed_kernel, {"height": 512}),
        (product_errors.table_kernel, {"height": 32, "width": 64, "kind": kind}),
        (product_errors.added_kernel, {"width": 256}),
        (product_errors.check_kernel, {"height": 8, "width": 256, "of_left": kind, "of_made": kind, "of_bias": ""}),
        (product_errors.check_kernel, {"height": 8, "width": 256, "of_left": kind, "of_made": kind, "of_bias": kind}),
        (product_errors.numbers_kernel, {"width": 128, "at_once": 2048}),
        (contribution.contribution_kernel, {}),
    )  # fmt: skip
    for kernel, constants in of_witness:
        assert "atom" not in compiled(kernel, HOPPER, **constants).asm["ptx"]
