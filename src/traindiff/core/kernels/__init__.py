"""Tensors and arrays to summaries, by the first kernel in the registry that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traindiff.core.kernels import reference
from traindiff.core.kernels.parts import parts_of
from traindiff.core.kernels.registry import ARRAYS, AT_ONCE
from traindiff.core.summary import merge

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from traindiff.core.kernels.element_details import Elements
    from traindiff.core.shards import Shard


def summarize(tensor: Tensor, shard: Shard) -> np.void:
    """The summary of a torch tensor.

    Args:
        tensor: Any dense tensor, any strides, in a graph or not; never changed. What cannot be read where it is (on
            another device than the CPU, which is waited for; in short runs; in a dtype that NumPy does not have) is
            copied in parts of `parts.MOST` elements, so that memory does not grow with the tensor.
        shard: Which elements of the global tensor `tensor` holds; `shard.shape` is its shape (with
            a last axis of real and imaginary part for complex dtypes), or one flat range of as
            many elements.

    Returns:
        One element of dtype `traindiff.core.summary.SUMMARY`. NaN and infinities are counted and
        enter fingerprints; extremes, moments, sketch and profiles are of the finite elements.
        An empty tensor gives `traindiff.core.summary.empty()`.

    Raises:
        UnsupportedTensorError: The tensor has no dense elements that could be read.
    """
    if (found := _read_in_place(tensor, shard)) is not None:
        return found
    from traindiff.core.kernels import torch_arrays

    torch_arrays.check_supported(tensor)
    real = torch_arrays.as_real(tensor)
    made = [_of_part(view, held) for view, held in parts_of(real, shard)]
    one: np.void = made[0] if len(made) == 1 else merge(made)
    return one


def _read_in_place(tensor: Tensor, shard: Shard) -> np.void | None:
    """The summary by the first kernel that reads the tensor where it is; None where none does."""
    device = tensor.device.type
    for kernel in AT_ONCE:
        if device in kernel.device_types and (fast := kernel.load()) is not None and fast.reads(tensor):
            found: np.void = fast.summarize(tensor, shard)
            return found
    return None


def _of_part(tensor: Tensor, shard: Shard) -> np.void:
    """The summary of a part, which may be copied whole."""
    from traindiff.core.kernels import torch_arrays

    local = tensor if tensor.device.type == "cpu" else torch_arrays.on_cpu(tensor)
    if (found := _read_in_place(local, shard)) is not None:
        return found
    array = torch_arrays.elements(local)
    return reference.summarize_array(array.values, array.bits, shard, tiny=array.tiny)


def summarize_array(array: NDArray[Any], shard: Shard, elements: Callable[[], Elements], dtype: str = "") -> np.void:
    """The summary of a NumPy array; see `summarize`.

    Args:
        array: Real numbers, row-major; never changed.
        shard: Which elements of the global tensor it holds.
        elements: Its values and bits, for the NumPy reference, which summarizes what no kernel reads.
        dtype: Of the numbers, as torch spells it, if the array has their bits; the array's own if left out.

    Raises:
        UnsupportedTensorError: `elements` raises it.
    """
    for kernel in ARRAYS:
        if (fast := kernel.load()) is not None and fast.reads(array, dtype):
            summary: np.void = fast.summarize(array, shard, dtype)
            return summary
    found = elements()
    return reference.summarize_array(found.values, found.bits, shard, tiny=found.tiny)


def cpu_kernel_in_use() -> tuple[str, str]:
    """Which kernel summarizes tensors on the CPU, and why it is not the fast one; empty if it is."""
    if not any(kernel.load() for kernel in AT_ONCE):
        missing = "llvmlite 0.45 or newer is not installed, or cannot be loaded (pip install -U llvmlite)"
        return "NumPy reference", f"the NumPy reference, far slower: {missing}"
    from traindiff.core.kernels.cpu.code import host
    from traindiff.core.kernels.cpu.module import frame

    frame()  # shows that code can be built
    return f"SIMD code built through llvmlite for {host()}", ""
