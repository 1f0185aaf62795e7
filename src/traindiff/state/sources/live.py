"""Models and state dicts in memory; torch is imported only where they hold its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from traindiff.core.site import printable
from traindiff.errors import CheckpointError
from traindiff.state.dtypes import ITEM_BYTES, Bits, bits_type
from traindiff.state.sources.torch_files import named_tensors
from traindiff.state.stored import Role, StoredTensor


def of_object(value: Any) -> dict[str, StoredTensor]:
    """The tensors of a model (anything with `state_dict()`) or of a state dict, by name. Nothing is copied or changed.

    Raises:
        CheckpointError: It is neither, or a tensor is only a part of one, or has no elements.
    """
    state = value.state_dict() if hasattr(value, "state_dict") else value
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"a {type(value).__name__} is no path, model or state dict. Give one of them to traindiff.weights."
        )
    return named_tensors(state, "the state dict", _tensor)


def _tensor(value: Any, name: str, role: Role) -> StoredTensor | None:
    if isinstance(value, np.ndarray):
        dtype = value.dtype.name
        if dtype not in ITEM_BYTES:
            return None
        return StoredTensor(
            name=name, dtype=dtype, shape=value.shape, role=role, memory=partial(_rows_of_array, value, dtype)
        )
    if not (hasattr(value, "untyped_storage") and hasattr(value, "is_sparse")):
        return None
    if hasattr(value, "placements"):
        raise CheckpointError(
            f"{printable(name)} is a DTensor, of which this rank holds a part. Save the sharded state dict with "
            "torch.distributed.checkpoint, and give that directory."
        )
    from traindiff.core.kernels.torch_arrays import check_supported, dtype_name

    check_supported(value)
    tensor = value.detach()
    return StoredTensor(
        name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape), role=role, memory=partial(_rows, tensor)
    )


def _rows(tensor: Any, first: int, end: int) -> Bits:
    """Rows of a torch tensor as bits; waits for its device."""
    import torch

    from traindiff.core.kernels.torch_arrays import dtype_name

    part = tensor[first:end] if tensor.dim() else tensor.reshape(1)
    part = part.cpu().resolve_conj().resolve_neg().contiguous()
    bits: Bits = part.reshape(-1).view(torch.uint8).numpy().view(bits_type(dtype_name(tensor)))
    return bits


def _rows_of_array(array: Any, dtype: str, first: int, end: int) -> Bits:
    part = array[first:end] if array.ndim else array.reshape(1)
    return np.frombuffer(np.ascontiguousarray(part).tobytes(), dtype=bits_type(dtype))
