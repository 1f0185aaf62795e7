"""Parameters that ZeRO stage 3 has partitioned: each rank keeps a range of the elements, between uses nothing else."""

from __future__ import annotations

from typing import Any

from torch import Tensor, distributed

from traindiff.errors import UnsupportedTensorError
from traindiff.shards import Shard


def shape_before_zero(parameter: Tensor) -> tuple[int, ...] | None:
    """The shape of all of a parameter of ZeRO stage 3: its own is `(0,)` unless it is gathered. None for any other."""
    found: Any = parameter
    return tuple(found.ds_shape) if hasattr(found, "ds_tensor") else None


def kept_by_zero(parameter: Tensor) -> tuple[Tensor, Shard] | None:
    """The elements that this rank keeps, without padding, and which they are. None for other tensors.

    They are the parameter's value also while all of it is gathered, as small ones always are: nothing but the
    optimizer writes to it.

    Raises:
        UnsupportedTensorError: They are on disk just now.
    """
    found: Any = parameter
    if not hasattr(found, "ds_tensor"):
        return None
    kept: Tensor = found.ds_tensor
    shard = kept_range(parameter)
    if kept.numel() < shard.size:
        raise UnsupportedTensorError("ZeRO has moved the parameter to NVMe")
    return kept.detach().reshape(-1)[: shard.size], shard


def kept_range(parameter: Tensor) -> Shard:
    """Which elements of a partitioned parameter this rank keeps: a flat range, empty where padding is all it has."""
    found: Any = parameter
    size = partition_size(parameter)
    first = min(distributed.get_rank(found.ds_process_group) * size, int(found.ds_numel))
    held = min(size, int(found.ds_numel) - first)
    return Shard(shape=(held,), global_shape=tuple(found.ds_shape), offset=(first,))


def partition_size(parameter: Tensor) -> int:
    """Elements that each rank keeps, with padding."""
    found: Any = parameter
    return int(found.ds_tensor.ds_numel)
