"""Over which ranks an engine reduces gradients: those that share the batch."""

from __future__ import annotations

from typing import Any

from torch import distributed, nn

from traindiff.engines.deepspeed_engine import find_engine
from traindiff.taps._torch_compat import data_mesh_of, is_fully_sharded, replicating_group

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
