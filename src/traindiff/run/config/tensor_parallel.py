"""`parallelize_module`: ranks divide the parameters as the recipe says, and work on the same batch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import parallelize_module

from traindiff.run.config.model_calls import Names, follow, names_of
from traindiff.run.config.precision import autocast
from traindiff.run.config.request import Request
from traindiff.run.config.stepping import Parts, compiled, stepped, with_optimizer
from traindiff.run.config.training import Training


def build(request: Request) -> Training:
    """The training with tensor parallelism over all ranks.

    Raises:
        ConfigError: The recipe does not say how the model is divided.
    """
    setup, model = request.setup, request.model
    plan = request.training.tensor_parallel
    if plan is None:
        raise request.lacks(
            "tensor_parallel",
            message="is not given, without which it is not known how tensor parallelism divides the model.",
            fix='Give traindiff.Training(tensor_parallel={"layers.*.up": ColwiseParallel(), ...}), as '
            "parallelize_module takes it, or a function of model and mesh.",
        )
    names, optimizer = names_of(model), with_optimizer(request)
    mesh = init_device_mesh(request.device.type, (request.world_size,), mesh_dim_names=("tp",))
    if callable(plan):
        plan(model, mesh)
    else:
        parallelize_module(model, mesh, dict(plan))
    _tie_again(request, model, names)
    follow(request, optimizer, names, model)
    return stepped(
        request,
        Parts(
            model=compiled(model, setup),
            optimizer=optimizer,
            clip=partial(_clip, model),
            around=lambda: autocast(setup, request.device),
            updating=implicit_replication,  # its operators take divided parameters and copies at once
        ),
    )


def _tie_again(request: Request, model: nn.Module, names: Names) -> None:
    """Tie what was tied: `parallelize_module` makes new parameters of each module by itself.

    Raises:
        ConfigError: They are divided differently now, so that they cannot be one.
    """
    for name, first in names.first.items():
        owner, _, attribute = name.rpartition(".")
        one, other = model.get_parameter(first), model.get_parameter(name)
        if one is other:
            continue
        placements = [getattr(parameter, "placements", None) for parameter in (one, other)]
        if placements[0] != placements[1]:
            raise request.lacks(
                "tensor_parallel",
                message=f"divides {first} as {placements[0]} and {name} as {placements[1]}, and they are tied.",
                fix="Divide both in the same way, or neither.",
            )
        setattr(model.get_submodule(owner), attribute, one)


def _clip(model: nn.Module, largest_norm: float) -> None:
    """`clip_grad_norm_`, for gradients of which some are divided and others are copies."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norms = [nn.utils.get_total_norm([parameter.grad]) for parameter in parameters if parameter.grad is not None]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(whole))
    nn.utils.clip_grads_with_norm_(parameters, largest_norm, total, foreach=False)
