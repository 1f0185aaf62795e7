"""`fully_shard`: each rank has rows of every parameter, and its part of every micro-batch."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from traindiff.run.config.model_calls import follow, names_of, repeated_modules
from traindiff.run.config.precision import dtype_of
from traindiff.run.config.request import Request
from traindiff.run.config.stepping import Parts, compiled, stepped, with_optimizer
from traindiff.run.config.training import Training


def build(request: Request) -> Training:
    """The training under FSDP2, each layer of a list of layers by itself.

    In a short dtype, parameters and inputs are rounded to it, and gradients are reduced in float32.
    """
    setup, model = request.setup, request.model
    names, optimizer = names_of(model), with_optimizer(request)
    mesh = init_device_mesh(request.device.type, (request.world_size,), mesh_dim_names=("data",))
    policy = MixedPrecisionPolicy()
    if setup.dtype != "float32":
        policy = MixedPrecisionPolicy(param_dtype=dtype_of(setup), reduce_dtype=torch.float32)
    for layer in (*repeated_modules(model), model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    follow(request, optimizer, names, model)
    return stepped(
        request,
        Parts(
            model=compiled(model, setup),
            optimizer=optimizer,
            part=request.rank,
            parts=request.world_size,
        ),
    )
