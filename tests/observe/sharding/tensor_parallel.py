"""The transformer, divided by `parallelize_module`."""

from __future__ import annotations

from typing import Any

from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.observe.sharding.transformer import world_size


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (world_size(),), mesh_dim_names=("tp",))


def sequence_parallel(
    model: nn.Module, mesh: DeviceMesh, *, head: Any = None, norm: Any = SequenceParallel
) -> nn.Module:
    """As torchtitan does: between attention and MLP, ranks have parts of the sequence."""
    norms = {} if norm is None else {"attention_norm": norm(), "ffn_norm": norm()}
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            **({} if norm is None else {"norm": norm()}),
            "head": head or ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                **norms,
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return model


def without_sequence(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Norms and residual stream are copies on all ranks."""
    parallelize_module(
        model,
        mesh,
        {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())},
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(),
            },
        )
    return model


def with_sequence_parallelism(model: nn.Module) -> nn.Module:
    return sequence_parallel(model, tp_mesh())


def with_copies(model: nn.Module) -> nn.Module:
    return without_sequence(model, tp_mesh())


def with_plain_norms(model: nn.Module) -> nn.Module:
    """Norms work on parts of the sequence with plain parameters, of whose gradients every rank has a term."""
    return sequence_parallel(model, tp_mesh(), norm=None)


def reduce_norms(model: nn.Module, forgotten: str = "") -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name and name != forgotten:
            distributed.all_reduce(parameter.grad)
