"""DTensor: FSDP2, tensor and sequence parallelism say by placements which part of a tensor a rank holds."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from traindiff.shard import Shard


def is_distributed(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor. Imports nothing: where there is one, its module is loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor, shard: Shard) -> tuple[Tensor, Shard, int | None]:
    """The local part of a DTensor, without any collective.

    Args:
        tensor: A DTensor.
        shard: What the tensor as a whole is of something larger, e.g. one micro-batch of the batch.

    Returns:
        The local elements; which elements of the global tensor they are; and where ranks hold terms of a sum
        (a placement `Partial`), which term this is, else None.
    """
    found: Any = tensor
    local: Tensor = found.to_local()  # the elements as they are: no communication
    shape, offset = _box(found)
    whole = shard.offset if len(shard.offset) == len(shape) else (0,) * len(shape)
    part = Shard(
        shape=tuple(shape),
        global_shape=shard.global_shape,
        offset=tuple(first + more for first, more in zip(whole, offset, strict=True)),
    )
    return local.detach(), part, _term(found)


def mesh_of(tensor: Tensor) -> Any:
    """The device mesh of a DTensor."""
    found: Any = tensor
    return found.device_mesh


def _box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def _term(tensor: Any) -> int | None:
    """Place of this rank along the axes of the mesh over which the tensor is to be summed."""
    term: int | None = None
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            mesh = tensor.device_mesh
            term = (term or 0) * mesh.size(axis) + mesh.get_local_rank(axis)
    return term
