"""DTensors: the placements of FSDP2, tensor and sequence parallelism say which part of a tensor a rank holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from traindiff.core.shards import Region
from traindiff.core.torch_compat.training import data_mesh_of, is_fully_sharded, modules_in, parameters_in, root_mesh


def is_distributed(tensor: Tensor) -> bool:
    """True if the tensor is a DTensor. Imports nothing: where there is one, its module is loaded."""
    if type(tensor) is Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def kept_of_distributed(tensor: Tensor) -> tuple[Tensor, Region] | None:
    """This rank's part of a DTensor and its region, without waiting for a collective; None for any other tensor."""
    if not is_distributed(tensor):
        return None
    found: Any = tensor
    with torch.no_grad():
        local: Tensor = found.to_local()
    return local, region_of(tensor)


def mesh_of(tensor: Any) -> Any:
    """The device mesh of a DTensor."""
    return tensor.device_mesh


def region_of(tensor: Any) -> Region:
    """The region of this rank's part of a DTensor."""
    return region_placed(tensor.shape, tensor.device_mesh, tensor.placements)


def region_placed(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Region:
    """The region of a tensor that this rank holds, from its placements (one per axis of the mesh).

    Placements apply from left to right; None means copies. FSDP2 may divide a dim that tensor parallelism has already
    divided on an axis further right. Then FSDP2's placement has a factor: the number of blocks into which the dim is
    divided first.
    """
    region = Region.whole(tuple(shape))
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh and holds nothing
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """Ranks along one axis of a mesh.

    Attributes:
        ranks: Their numbers in the whole training.
        index: Position of this rank among them.
    """

    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


def axis_of(given: Any, model: nn.Module) -> MeshAxis | str:
    """The axis that the user named, or why there is none, for a message.

    Args:
        given: Name of an axis of the model's mesh, a DeviceMesh with one axis, or a process group.
        model: Its parameters may know a mesh with that name.
    """
    if isinstance(given, str):
        return _named(given, model)
    if isinstance(given, distributed.ProcessGroup):
        return MeshAxis(ranks=tuple(distributed.get_process_group_ranks(given)), index=distributed.get_rank(given))
    if not isinstance(given, DeviceMesh):
        return f"has the axis {given!r}, which is no name, no DeviceMesh and no process group."
    if given.ndim != 1:
        return f"has as its axis a DeviceMesh with {given.ndim} axes."
    return MeshAxis(ranks=tuple(given.mesh.flatten().tolist()), index=given.get_local_rank())


def _named(name: str, model: nn.Module) -> MeshAxis | str:
    known: dict[str, None] = {}
    for mesh in _meshes(model):
        names = mesh.mesh_dim_names or ()
        if name in names:
            found: MeshAxis | str = axis_of(mesh if mesh.ndim == 1 else mesh[name], model)
            return found
        known |= dict.fromkeys(names)
    if not known:
        return f'has the axis "{name}", but no parameter of the model knows a DeviceMesh.'
    return f'has the axis "{name}", which the model\'s DeviceMesh does not have. Known: {", ".join(known)}.'


def _meshes(model: nn.Module) -> Iterable[Any]:
    """The meshes of the model's parameters, and the meshes around these; each once."""
    of_parameters = (mesh_of(parameter) for parameter in parameters_in(model) if is_distributed(parameter))
    direct = (*of_parameters, *sharding_meshes(model))
    return {id(one): one for mesh in direct for one in (mesh, root_mesh(mesh))}.values()


def sharding_meshes(model: nn.Module) -> Iterator[Any]:
    """The meshes over which FSDP2 divides modules of a model."""
    for module in modules_in(model):
        if is_fully_sharded(module) and (mesh := data_mesh_of(module)) is not None:
            yield mesh
