"""DTensor: FSDP2, tensor and sequence parallelism say by placements which part of a tensor a rank holds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from traindiff.region import Region


def is_distributed(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor. Imports nothing: where there is one, its module is loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def kept_of_distributed(tensor: Tensor) -> tuple[Tensor, Region] | None:
    """What this rank holds of a DTensor, as it is, without waiting for a collective, and where. None for any other."""
    if not is_distributed(tensor):
        return None
    found: Any = tensor
    with torch.no_grad():
        local: Tensor = found.to_local()
    return local, region_of(tensor)


def mesh_of(tensor: Tensor) -> Any:
    """The device mesh of a DTensor."""
    found: Any = tensor
    return found.device_mesh


def region_of(tensor: Tensor) -> Region:
    """Where this rank's part of a DTensor lies."""
    found: Any = tensor
    return region_placed(found.shape, found.device_mesh, found.placements)


def region_placed(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Region:
    """Where this rank's part of a tensor lies that has these placements, by axis of the mesh.

    Placements are carried out from left to right; None stands for copies. FSDP2 divides along a dim that tensor
    parallelism, further right, has divided already: it says so by a factor, the number of blocks to divide first.
    """
    region = Region.whole(tuple(shape))
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # not a rank of the mesh: it holds nothing
        return Region(shape=region.shape, ranges=tuple(((length, 0),) for length in region.shape))
    for axis, placement in enumerate(placements):
        size, index = mesh.size(axis), coordinate[axis]
        if placement is None or placement.is_replicate():
            continue
        if placement.is_partial():
            region = region.summed(size=size, index=index)
        else:
            blocks = getattr(placement, "split_factor", 1)
            region = region.cut(placement.dim, size=size, index=index, blocks=blocks)
    return region
