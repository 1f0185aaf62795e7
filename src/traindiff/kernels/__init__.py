"""Tensors to summaries, by the first kernel in the registry that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traindiff.kernels import reference
from traindiff.kernels.registry import AT_ONCE

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from traindiff.shards import Shard


def summarise(tensor: Tensor, shard: Shard) -> np.void:
    """The summary of a torch tensor.

    Args:
        tensor: Any dense tensor, any strides, in a graph or not; never changed. On another device
            than the CPU its elements are copied, which waits for that device.
        shard: Which elements of the global tensor `tensor` holds; `shard.shape` is its shape (with
            a last axis of real and imaginary part for complex dtypes), or one flat range of as
            many elements.

    Returns:
        One element of dtype `traindiff.summary.SUMMARY`. NaN and infinities are counted and
        enter fingerprints; extremes, moments, sketch and profiles are of the finite elements.
        An empty tensor gives `traindiff.summary.empty()`.

    Raises:
        UnsupportedTensorError: The tensor has no dense elements that could be read.
    """
    from traindiff.kernels import torch_arrays

    torch_arrays.check_supported(tensor)
    for kernel in AT_ONCE:
        if tensor.device.type in kernel.device_types and (fast := kernel.load()) is not None and fast.reads(tensor):
            summary: np.void = fast.summarise(tensor, shard)
            return summary
    found = torch_arrays.elements(torch_arrays.as_real(tensor))
    return reference.summarise_array(found.values, found.bits, shard, tiny=found.tiny)


def cpu_kernel_in_use() -> tuple[str, str]:
    """Which kernel summarises tensors on the CPU, and why it is not the fast one; empty if it is."""
    if not any(kernel.load() for kernel in AT_ONCE):
        return "NumPy reference", "the NumPy reference, far slower: llvmlite is not installed (pip install llvmlite)"
    from traindiff.kernels.cpu.machine_code import host
    from traindiff.kernels.cpu.module import frame

    frame()  # shows that code can be built
    return f"SIMD code built through llvmlite for {host()}", ""
