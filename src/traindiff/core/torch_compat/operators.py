"""Private names of torch's operators: their schemas, and how they round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

DRAWING = frozenset(
    {
        "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal", "normal_",
        "uniform", "uniform_", "bernoulli", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_",
        "poisson", "multinomial", "binomial", "random_", "normal_functional",
    }
)  # fmt: skip
"""Names of the operators of aten whose output is nothing but random numbers."""


def operator_schema(operator: Any) -> Any:
    """The schema of an operator that was dispatched; None if it has none. There is no public way to ask."""
    return getattr(operator, "_schema", None)


def is_overload(operator: object) -> bool:
    """True for one overload of an operator, e.g. `torch.ops.aten.add.Tensor`. Its class has no public name."""
    return isinstance(operator, torch._ops.OpOverload)


def schemas_of(name: str) -> list[Any]:
    """The schemas of all overloads of an operator, e.g. of `aten::add`; none if there is no such operator.

    `torch.ops` finds operators by attributes of objects, which have others too; this asks what is registered.
    """
    return list(torch._C._jit_get_schemas_for_operator(name))


def inputs_may_be_rounded_to(device: str, *, convolution: bool) -> str:
    """The format to which products of float32 may round their inputs: `tf32`, `bf16`, or empty.

    The settings have public names on each backend since torch 2.9. `fp32_precision` is that of one kind of operators
    there, and `none` asks the backend's, and then the one of all.

    Args:
        device: Type of the device.
        convolution: True for convolutions, False for matrix products.
    """
    backends: Any = torch.backends
    backend = {"cuda": backends.cudnn if convolution else backends.cuda, "cpu": backends.mkldnn}.get(device)
    own = getattr(backend, "conv" if convolution else "matmul", None)
    for settings in (own, backend, backends):
        found = getattr(settings, "fp32_precision", None)
        if found not in (None, "none"):
            return str(found) if found in ("tf32", "bf16") else ""
    return ""


def float32_matmul_precision() -> str:
    """What `torch.get_float32_matmul_precision` returns: `highest`, `high` or `medium`.

    Since torch 2.9 that function raises an error if a program has used the new names of these settings
    (`torch.backends.cuda.matmul.fp32_precision = "tf32"`). Then this is the shortest precision that they allow.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        allowed = {inputs_may_be_rounded_to(device, convolution=False) for device in ("cpu", "cuda")}
        return "medium" if "bf16" in allowed else "high" if "tf32" in allowed else "highest"


def cuda_matmul_tf32() -> bool:
    """`torch.backends.cuda.matmul.allow_tf32`, which raises the same errors as `torch.get_float32_matmul_precision`."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        return inputs_may_be_rounded_to("cuda", convolution=False) == "tf32"


def partial_sums_may_be_short(device: str, dtype: torch.dtype) -> bool:
    """True if a library may add up parts of a sum in this dtype, the one of the output."""
    settings: Any = torch.backends.cuda.matmul
    if device == "cuda" and dtype == torch.bfloat16:
        return bool(settings.allow_bf16_reduced_precision_reduction)
    if device == "cuda" and dtype == torch.float16:
        names = ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation")
        return any(bool(getattr(settings, name, False)) for name in names)
    if device == "cpu" and dtype == torch.float16:
        return bool(getattr(torch._C, "_get_cpu_allow_fp16_reduced_precision_reduction", lambda: False)())
    return False


@contextmanager
def without_onednn() -> Iterator[None]:
    """Inside it, layers are made of operators that exist in every dtype.

    The public way, `torch.backends.mkldnn.flags`, sets the precision of oneDNN on Intel GPUs too, and warns of it.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # noqa: FBT003
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
