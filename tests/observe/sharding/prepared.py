"""The small model under engines that divide it or its batch among all ranks."""

from __future__ import annotations

from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.observe.sharding.training import Model


def in_ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def in_fsdp2(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_tensor_parallel(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model
