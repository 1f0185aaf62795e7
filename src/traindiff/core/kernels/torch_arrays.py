"""A torch tensor's elements as NumPy arrays: their values, and their raw bits."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from traindiff.core.kernels.element_details import Elements, detail_of_elements, is_wanted
from traindiff.core.summary import Detail
from traindiff.errors import UnsupportedTensorError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes by size in bytes. Before torch 2.3 only uint8 is unsigned; NumPy reads the same bits as unsigned."""

LOWEST_ADDRESS = 1 << 32
"""Tensors below it may have lost their memory: then the address is 0, and the place of the first element after it."""

_ABSTRACT = frozenset({"FakeTensor", "FunctionalTensor"})


def check_supported(tensor: torch.Tensor) -> None:
    """Refuse a tensor that cannot be summarized.

    Raises:
        UnsupportedTensorError: Sparse, quantized, nested, meta, fake or lazy tensors.
    """
    if is_lazy(tensor):
        raise UnsupportedTensorError("a lazy parameter has no elements before the first forward pass")
    if tensor.is_nested:
        raise UnsupportedTensorError("a nested tensor has no dense elements")
    if tensor.layout != torch.strided:
        raise UnsupportedTensorError(f"layout {str(tensor.layout).removeprefix('torch.')} has no dense elements")
    if tensor.is_quantized:
        raise UnsupportedTensorError(f"quantized dtype {dtype_name(tensor)} is not supported")
    if tensor.device.type == "meta":
        raise UnsupportedTensorError("a tensor on the meta device has no elements")
    if type(tensor).__name__ in _ABSTRACT:
        raise UnsupportedTensorError(f"a {type(tensor).__name__} has no elements")
    _check_memory(tensor)
    if tensor.element_size() not in _INTEGERS and not tensor.is_complex():
        raise UnsupportedTensorError(f"dtype {dtype_name(tensor)} is not supported")


def _check_memory(tensor: torch.Tensor) -> None:
    if is_freed(tensor, unknown=False):
        raise UnsupportedTensorError("it has no memory: that was freed, or is not there yet")


def is_abstract(tensor: torch.Tensor) -> bool:
    """True if a tensor has only a shape and no elements, because torch is tracing."""
    return tensor.device.type == "meta" or type(tensor).__name__ in _ABSTRACT


def is_freed(tensor: torch.Tensor, *, unknown: bool = True) -> bool:
    """True if a strided tensor has no memory, so to read it crashes: an engine has freed it, as FSDP does between uses.

    Or it was never there, as for torch's `ZeroTensor`.

    Args:
        tensor: A tensor.
        unknown: The answer inside a transform of `torch.func`, where there is no single memory.
    """
    if not tensor.numel():
        return False
    try:
        held = tensor.untyped_storage().nbytes()
        begin = tensor.storage_offset() * tensor.element_size()
        lacks = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.data_ptr() in (0, begin)
    except RuntimeError:
        return unknown
    return lacks or held < begin + tensor.element_size()


_COMPRESSED: Mapping[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"), torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"), torch.sparse_bsc: ("ccol_indices", "row_indices"),
}  # fmt: skip


def sparse_parts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The dense tensors of which a sparse tensor consists, with torch's names: its indices, and its values.

    Elements of a `sparse_coo` tensor that lie at one place are added up, and all are ordered by their places: tensors
    that stand for the same elements have the same parts. The tensor itself is not changed.

    Returns:
        Detached tensors; empty for a tensor that is not sparse, or has no elements because torch is tracing.
    """
    if tensor.is_nested or tensor.layout == torch.strided or is_abstract(tensor):
        return []
    detached = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        whole = detached.coalesce()
        return [("indices", whole.indices()), ("values", whole.values())]
    names = (*_COMPRESSED[tensor.layout], "values") if tensor.layout in _COMPRESSED else ()
    return [(name, getattr(detached, name)()) for name in names]


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's shape; empty for nested and lazy tensors."""
    if type(tensor) is torch.Tensor and not tensor.is_nested:  # as a rule
        return tuple(tensor.shape)
    return () if tensor.is_nested or is_lazy(tensor) else tuple(tensor.shape)


@cache
def name_of_dtype(dtype: torch.dtype) -> str:
    """`float32`, `bfloat16`, ...: torch's name without its prefix."""
    return str(dtype).removeprefix("torch.")


def dtype_name(tensor: torch.Tensor) -> str:
    """`float32`, `bfloat16`, ...: torch's name without its prefix."""
    return name_of_dtype(tensor.dtype)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A detached tensor of real numbers; a complex tensor gets a last axis for real and imaginary part."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor from another device; waits for the device.

    Raises:
        UnsupportedTensorError: Its elements cannot be read.
    """
    try:
        return tensor.cpu()
    except (RuntimeError, TypeError) as error:
        raise _unreadable(error) from error


def address(tensor: torch.Tensor) -> int:
    """The memory address of the tensor's first element.

    Raises:
        UnsupportedTensorError: Its elements cannot be read: it is a fake tensor, it is inside a transform of
            `torch.func`, or its memory was freed.
    """
    try:
        found = tensor.data_ptr()
    except RuntimeError as error:
        raise UnsupportedTensorError(f"its elements cannot be read: {error}") from error
    if found < LOWEST_ADDRESS:
        _check_memory(tensor)
    return found


def addresses(tensors: Sequence[torch.Tensor]) -> array[int] | None:
    """The address of the first element of each of many strided tensors; None if one of them has lost its memory."""
    found = array("Q", map(Tensor.data_ptr, tensors))
    maybe = min(found, default=LOWEST_ADDRESS) < LOWEST_ADDRESS
    if maybe and any(at < LOWEST_ADDRESS and is_freed(one) for at, one in zip(found, tensors, strict=True)):
        return None
    return found


def elements(tensor: torch.Tensor) -> Elements:
    """Values and bits of a real tensor that `check_supported` accepts. Copies only what is strided.

    Raises:
        UnsupportedTensorError: Its elements cannot be read: fake tensors, those inside a
            transform of `torch.func`, dtypes that torch itself cannot convert.
    """
    try:
        return _elements(tensor)
    except (RuntimeError, TypeError) as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> UnsupportedTensorError:
    reason = str(error).strip().partition("\n")[0]
    return UnsupportedTensorError(f"its elements cannot be read: {reason}")


def _elements(tensor: torch.Tensor) -> Elements:
    flat = tensor.contiguous().reshape(-1).cpu()
    dtype = flat.dtype
    size = flat.element_size()
    bits = flat.view(_INTEGERS[size]).numpy().view(f"u{size}")
    if dtype.is_floating_point:
        plain = dtype in (torch.float16, torch.float32, torch.float64)
        values = flat if plain else flat.to(torch.float32)
        return Elements(values=values.numpy(), bits=bits, tiny=torch.finfo(dtype).smallest_normal)
    return Elements(values=flat.numpy(), bits=bits, tiny=0.0)


def detail_of(
    tensor: Tensor, wanted: Collection[str], *, bounds: Sequence[float] = (), summary: Any = None
) -> Detail | None:
    """The wanted parts of a tensor that `traindiff.core.kernels.summarize` takes; see `detail_of_elements`."""
    if not (set(wanted) - {"summary"} or bounds):
        return None
    real = as_real(tensor)
    if not is_wanted(real.shape, wanted, bounds):
        return None
    found, dtype = elements(real), dtype_name(real)
    return detail_of_elements(found, tuple(real.shape), dtype, wanted, bounds=bounds, summary=summary)
