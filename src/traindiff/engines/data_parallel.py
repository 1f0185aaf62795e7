"""Which ranks share the batch: the samples that this one sees are rows of the global batch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import distributed, nn

from traindiff.engines.deepspeed_engine import find_engine
from traindiff.engines.distributed_tensor import is_distributed, mesh_of
from traindiff.taps._torch_compat import data_mesh_of

BY_HAND = "by hand"
"""Engine of models that say nothing of why there are several ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """This rank's place among those that each have a part of the batch.

    Attributes:
        rank: Its number among them.
        size: How many there are.
        engine: What divides the batch, e.g. `DistributedDataParallel`; empty for a single process.
        alike: How many ranks work on the same samples, because they divide the model; 1 where each has its own.
    """

    rank: int = 0
    size: int = 1
    engine: str = ""
    alike: int = 1

    @property
    def factor(self) -> float:
        """What gradients before the reduction, which averages, are multiplied by, relative to the global batch's."""
        return float(self.size)

    def to_json(self) -> dict[str, Any] | None:
        """For `run.json`; None for a single process."""
        if not self.engine:
            return None
        model_parallel = {"model_parallel": self.alike} if self.alike > 1 else {}
        return {"data_parallel": self.size, **model_parallel, "engine": self.engine}


def find_data_parallel(model: nn.Module) -> DataParallel:
    """How the batch is divided, as far as the model tells.

    DistributedDataParallel, both FSDPs and DeepSpeed's engine know their process groups. A model with
    tensor-parallel parameters only is given the same batch on all ranks. Any other model on several ranks is taken as
    data-parallel over all of them, by hand or by an optimizer that shards its state.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return DataParallel()
    world_size = distributed.get_world_size()
    if (engine := find_engine(model)) is not None:
        group: Any = engine.data_parallel_group
        return DataParallel(
            rank=distributed.get_rank(group), size=distributed.get_world_size(group), engine="DeepSpeedEngine"
        )
    for module in model.modules():
        name = type(module).__qualname__
        if name in ("DistributedDataParallel", "FullyShardedDataParallel"):
            group = module.process_group
            size = distributed.get_world_size(group)
            return DataParallel(
                rank=distributed.get_rank(group), size=size, engine=name, alike=_alike(model, world_size // size)
            )
        if (mesh := _fsdp_mesh(module)) is not None:
            size = mesh.size()
            return DataParallel(
                rank=_rank_in(mesh), size=size, engine="fully_shard", alike=_alike(model, world_size // size)
            )
    for parameter in model.parameters():
        if is_distributed(parameter):
            ranks = mesh_of(parameter).mesh.flatten().tolist()
            size = world_size // len(ranks)
            rank = without(distributed.get_rank(), ranks)
            return DataParallel(rank=rank, size=size, engine="tensor parallel", alike=len(ranks))
    return DataParallel(rank=distributed.get_rank(), size=world_size, engine=BY_HAND)


def without(rank: int, axis: Sequence[int]) -> int:
    """Number of a rank among those of a mesh that lacks one of its axes.

    Args:
        rank: Number of the rank in the whole mesh, in which the last axis counts fastest.
        axis: Numbers of the ranks along the axis that is left out, this one among them.
    """
    size = len(axis)
    step = axis[1] - axis[0] if size > 1 else 1
    return rank // (step * size) * step + rank % step


def _alike(model: nn.Module, most: int) -> int:
    """How many ranks work on the same samples, of those that the data-parallel engine does not divide them among."""
    return most if any(map(is_distributed, model.parameters())) else 1


def _rank_in(mesh: Any) -> int:
    """This rank's number in a mesh, in which the last axis counts fastest."""
    rank = 0
    for axis, index in enumerate(mesh.get_coordinate()):
        rank = rank * mesh.size(axis) + index
    return rank


def _fsdp_mesh(module: nn.Module) -> Any:
    """The mesh over which FSDP2 divides the batch; None for modules that it does not manage."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return None
    return data_mesh_of(module)
