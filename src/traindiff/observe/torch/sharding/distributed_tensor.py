"""DTensor: FSDP2, tensor and sequence parallelism say by placements which part of a tensor a rank holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from traindiff.core.shards import Region
from traindiff.core.torch_compat.training import data_mesh_of, is_fully_sharded, replicating_group, root_mesh
from traindiff.observe.torch.sharding.deepspeed_optimizer import find_engine

# Each returns the ranks in order, or None where the model is not one of the engine's.


def of_deepspeed(model: nn.Module) -> list[int] | None:
    """Those of DeepSpeed's engine."""
    engine = find_engine(model)
    return None if engine is None else distributed.get_process_group_ranks(engine.data_parallel_group)


def of_data_parallel(model: nn.Module) -> list[int] | None:
    """Those of DistributedDataParallel."""
    return _of_wrapper(model, "DistributedDataParallel")


def of_fsdp1(model: nn.Module) -> list[int] | None:
    """Those of FSDP1, where it shards and where it copies."""
    return _of_wrapper(model, "FullyShardedDataParallel")


def of_fsdp2(model: nn.Module) -> list[int] | None:
    """Those of `fully_shard`."""
    for module in model.modules():
        if is_fully_sharded(module) and (mesh := data_mesh_of(module)) is not None:
            ranks: list[int] = mesh.mesh.flatten().tolist()
            return ranks
    return None


def _of_wrapper(model: nn.Module, name: str) -> list[int] | None:
    for module in model.modules():
        if type(module).__qualname__ == name:
            group: Any = module.process_group
            ranks, copies = distributed.get_process_group_ranks(group), replicating_group(module)
            if copies is None:
                return ranks
            own = distributed.get_rank()
            return [copy + rank - own for copy in distributed.get_process_group_ranks(copies) for rank in ranks]
    return None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """Ranks along one axis of a mesh.

    Attributes:
        ranks: Their numbers in the whole training.
        index: Which of them this one is.
    """

    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.ranks)


def axis_of(given: Any, model: nn.Module) -> MeshAxis | str:
    """The axis that the user means, or what is wrong with it.

    Args:
        given: Name of an axis of the model's mesh, a DeviceMesh with one axis, or a process group.
        model: Its parameters may know the mesh.
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


def _meshes(model: nn.Module) -> Iterator[Any]:
    """The meshes of the model's parameters, and what these are parts of; each once."""
    seen: dict[int, Any] = {}
    for mesh in _direct(model):
        for one in (mesh, root_mesh(mesh)):
            if id(one) not in seen:
                seen[id(one)] = one
                yield one


def _direct(model: nn.Module) -> Iterable[Any]:
    yield from (mesh_of(parameter) for parameter in model.parameters() if is_distributed(parameter))
    for module in model.modules():
        if is_fully_sharded(module) and (mesh := data_mesh_of(module)) is not None:
            yield mesh
