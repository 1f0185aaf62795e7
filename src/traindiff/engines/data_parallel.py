"""Which ranks share the batch: the samples that this one sees are rows of the global batch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import distributed, nn

from traindiff.engines.distributed_tensor import is_distributed, mesh_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """This rank's place among those that each have a part of the batch.

    Attributes:
        rank: Its number among them.
        size: How many there are.
        engine: What divides the batch, e.g. `DistributedDataParallel`; empty for a single process.
    """

    rank: int = 0
    size: int = 1
    engine: str = ""

    @property
    def factor(self) -> float:
        """What gradients before the reduction, which averages, are multiplied by, relative to the global batch's."""
        return float(self.size)

    def to_json(self) -> dict[str, Any] | None:
        """For `run.json`; None for a single process."""
        return {"data_parallel": self.size, "engine": self.engine} if self.engine else None


def find_data_parallel(model: nn.Module) -> DataParallel:
    """How the batch is divided, as far as the model tells.

    DistributedDataParallel and both FSDPs know their process groups. A model with tensor-parallel parameters
    only is given the same batch on all ranks. Any other model on several ranks is taken as data-parallel over
    all of them, by hand or by an optimizer that shards its state.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return DataParallel()
    for module in model.modules():
        name = type(module).__qualname__
        if name in ("DistributedDataParallel", "FullyShardedDataParallel"):
            group: Any = module.process_group
            return DataParallel(rank=distributed.get_rank(group), size=distributed.get_world_size(group), engine=name)
        if (mesh := _fsdp_mesh(module)) is not None:
            return DataParallel(rank=mesh.get_local_rank(), size=mesh.size(), engine="fully_shard")
    if any(is_distributed(parameter) for parameter in model.parameters()):
        return DataParallel(engine="tensor parallel")
    return DataParallel(rank=distributed.get_rank(), size=distributed.get_world_size(), engine="by hand")


def _fsdp_mesh(module: nn.Module) -> Any:
    """The mesh over which FSDP2 shards a module's parameters; None for modules that it does not manage."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return None
    for parameter in module.parameters():
        if is_distributed(parameter):
            mesh = mesh_of(parameter)
            names = mesh.mesh_dim_names
            if mesh.ndim == 1 or not names:
                return mesh
            return mesh[_data_axis(names)]
    return None


def _data_axis(names: tuple[str, ...]) -> str:
    """Of a mesh with several axes: the one over which FSDP shards, which comes first."""
    return next((name for name in names if name.startswith(("dp", "fsdp", "data"))), names[0])
