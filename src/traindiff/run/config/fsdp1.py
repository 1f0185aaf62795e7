"""FullyShardedDataParallel: each rank has a range of flat parameters, and its part of every micro-batch."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy

from traindiff.run.config.model_calls import follow, names_of, repeated_modules
from traindiff.run.config.precision import dtype_of, loss_scaler
from traindiff.run.config.request import Request
from traindiff.run.config.stepping import Parts, compiled, stepped, with_optimizer
from traindiff.run.config.training import Training


def build(request: Request) -> Training:
    """The training under FSDP1: FULL_SHARD, original parameters, each layer of a list of layers by itself.

    In a short dtype, parameters and inputs are rounded to it, and gradients are reduced in float32.
    """
    setup = request.setup
    names, optimizer = names_of(request.model), with_optimizer(request)
    layers = {id(layer) for layer in repeated_modules(request.model)}
    mixed = None
    if setup.dtype != "float32":
        mixed = MixedPrecision(param_dtype=dtype_of(setup), reduce_dtype=torch.float32)
    wrapped = FullyShardedDataParallel(
        request.model,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in layers),
        mixed_precision=mixed,
        use_orig_params=True,
        device_id=request.device,
    )
    follow(request, optimizer, names, wrapped)

    def clip(largest_norm: float) -> None:
        wrapped.clip_grad_norm_(largest_norm)  # looked up when it is called, so that recordings see it

    return stepped(
        request,
        Parts(
            model=compiled(wrapped, setup),
            optimizer=optimizer,
            part=request.rank,
            parts=request.world_size,
            clip=clip,
            scaler=loss_scaler(setup, optimizer, device=request.device, made=ShardedGradScaler),
        ),
    )
