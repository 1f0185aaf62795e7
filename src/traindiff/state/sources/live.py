"""Models and state dicts in memory; torch is imported only where they hold its tensors.

Of a sharded model, its tensors are what this rank holds. No collective is called, so one rank may ask alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from traindiff.core.shards import Region, Shard
from traindiff.core.site import printable
from traindiff.errors import CheckpointError
from traindiff.state.dtypes import ITEM_BYTES, Bits, bits_type
from traindiff.state.sources.torch_files import named_tensors
from traindiff.state.stored import Role, StoredTensor

_SAVE = "Save with torch.distributed.checkpoint, and give that directory."


def of_object(value: Any) -> dict[str, StoredTensor]:
    """The tensors of a model (anything with `state_dict()`) or of a state dict, by name. Nothing is copied or changed.

    Raises:
        CheckpointError: It is neither, or a tensor has no elements, or is a term of a sum.
    """
    state = _state_of(value) if hasattr(value, "state_dict") else value
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"a {type(value).__name__} is no path, model or state dict. Give one of them to traindiff.weights."
        )
    return named_tensors(state, "the state dict", _tensor)


def _state_of(value: Any) -> Any:
    """A state dict: of parameters themselves, where it is a model, because engines note on them what a rank holds."""
    nn: Any = sys.modules.get("torch.nn")
    if nn is None or not isinstance(value, nn.Module):
        return value.state_dict()
    from traindiff.observe.torch.sharding.flat_parameters import find_flat_parameters

    flat = find_flat_parameters(value)
    return dict(_of_flat(value, flat)) if flat else value.state_dict(keep_vars=True)


def _of_flat(model: Any, flat: Any) -> Iterator[tuple[str, Any]]:
    """What this rank holds of a model under FSDP1, whose own `state_dict()` gathers all of it."""
    from traindiff.core.torch_compat.training import buffers_by_name, parameters_by_name

    views = {id(one.tensor) for one in flat} | {id(member.parameter) for one in flat for member in one.members}
    for one in flat:
        local = one.tensor.detach().reshape(-1)
        pieces = {piece.path: piece for piece in one.pieces(local.numel())}
        for member in one.members:
            held = _Held(local[:0], member.range(0, 0))
            if (piece := pieces.get(member.path)) is not None:
                held = _Held(local[piece.first : piece.first + piece.shard.size], piece.shard)
            yield from ((path, held) for path in (member.path, *member.others))
    for path, tensor in (*parameters_by_name(model).items(), *buffers_by_name(model).items()):
        if id(tensor) not in views:
            yield path, tensor


class _Held:
    """A part of a tensor, and which one it is."""

    __slots__ = ("part", "tensor")

    def __init__(self, tensor: Any, part: Region | Shard) -> None:
        self.tensor = tensor
        self.part = part


def _tensor(value: Any, name: str, role: Role) -> StoredTensor | None:
    if isinstance(value, np.ndarray):
        dtype = value.dtype.name
        if dtype not in ITEM_BYTES:
            return None
        return StoredTensor(
            name=name, dtype=dtype, shape=value.shape, role=role, memory=partial(_rows_of_array, value, dtype)
        )
    found = _held(value, name)
    if found is None:
        return None
    from traindiff.core.kernels.torch_arrays import check_supported, dtype_name

    check_supported(found.tensor)
    tensor, part = found.tensor.detach(), found.part
    is_whole = part.is_whole if isinstance(part, Region) else part.shape == part.global_shape
    return StoredTensor(
        name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape), role=role, memory=partial(_rows, tensor),
        held=None if is_whole else part,
    )  # fmt: skip


def _held(value: Any, name: str) -> _Held | None:
    """What this rank holds of a tensor; None for what is no tensor.

    Raises:
        CheckpointError: This rank holds a term of a sum, or several parts.
    """
    if isinstance(value, _Held):
        return value
    if hasattr(value, "local_shards") and hasattr(value, "metadata"):
        return _of_sharded_tensor(value, name)
    if not (hasattr(value, "untyped_storage") and hasattr(value, "is_sparse")):
        return None
    from traindiff.observe.torch.sharding.registry import ENGINES

    for engine in ENGINES:
        if (kept := engine.kept(value)) is not None:
            if isinstance(kept[1], Region) and kept[1].term is not None:
                raise CheckpointError(f"{printable(name)} is a sum, of which this rank holds one term. {_SAVE}")
            return _Held(*kept)
    return _Held(value, Region.whole(tuple(value.shape)))


def _of_sharded_tensor(value: Any, name: str) -> _Held:
    """What this rank holds of a tensor of FSDP1's sharded state dict."""
    shards, shape = value.local_shards(), tuple(value.metadata().size)
    if len(shards) > 1:
        raise CheckpointError(
            f"this rank holds {len(shards)} parts of {printable(name)}, and one at most can be compared. {_SAVE}"
        )
    if not shards:
        import torch

        empty = torch.empty(0, dtype=value.dtype)
        return _Held(empty, Shard(shape=(0,), global_shape=shape, offset=(0,)))
    about = shards[0].metadata
    ranges = tuple(((first, length),) for first, length in zip(about.shard_offsets, about.shard_sizes, strict=True))
    return _Held(shards[0].tensor, Region(shape=shape, ranges=ranges))


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
    if not part.dtype.isnative:
        part = part.astype(part.dtype.newbyteorder("="))
    return np.frombuffer(np.ascontiguousarray(part).tobytes(), dtype=bits_type(dtype))
