"""Trainings whose parameters are divided among ranks: FSDP1, FSDP2 and tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import Optimizer

from traindiff.core.site import canonical_path
from traindiff.core.torch_compat.training import live_children_of, parameters_by_name, parameters_in
from traindiff.run.config.precision import autocast, dtype_of, loss_scaler
from traindiff.run.config.request import Request
from traindiff.run.config.stepping import Parts, compiled, stepped, with_optimizer
from traindiff.run.config.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterNames:
    """Names of a model's parameters before an engine replaces the parameters.

    Attributes:
        by_id: First name of each parameter, by `id` of the tensor.
        first: First name of each parameter, by each of its names; tied parameters have several.
    """

    by_id: dict[int, str]
    first: dict[str, str]


def names_of(model: nn.Module) -> ParameterNames:
    """Names of all parameters, without the prefixes of wrappers."""
    by_id: dict[int, str] = {}
    first: dict[str, str] = {}
    for path, parameter in parameters_by_name(model).items():
        name = canonical_path(path)
        first[name] = by_id.setdefault(id(parameter), name)
    return ParameterNames(by_id=by_id, first=first)


def follow(request: Request, optimizer: Optimizer, names: ParameterNames, model: nn.Module) -> None:
    """Replace the parameters in an optimizer's groups by the parameters that an engine has put in their place.

    Class and settings of the optimizer stay. A parameter that `model` lacks leaves its group, which may become empty.

    Args:
        request: The request, for messages.
        optimizer: The optimizer to change.
        names: Names of the parameters before the engine replaced them.
        model: What this rank holds afterwards.

    Raises:
        ConfigError: The optimizer steps other tensors too, or already has state for the former parameters.
    """
    if optimizer.state:
        raise request.lacks(
            "optimizer",
            message=f"is {type(optimizer).__name__}, which has state before its first step: {request.setup.engine} "
            "divides parameters, and the state would not fit them.",
            fix="Use an optimizer that makes its state in its first step (Adam, AdamW, SGD), or engine=ddp.",
        )
    held = {
        names.first[name]: parameter
        for path, parameter in parameters_by_name(model).items()
        if (name := canonical_path(path)) in names.first
    }
    for group in optimizer.param_groups:
        if unknown := [parameter for parameter in group["params"] if id(parameter) not in names.by_id]:
            shapes = ", ".join(str(list(parameter.shape)) for parameter in unknown[:3])
            raise request.lacks(
                "optimizer",
                message=f"steps {len(unknown)} tensors that are no parameters of the model (shapes {shapes}).",
                fix="Make them parameters of the model, so that the engine knows them.",
            )
        called = [names.by_id[id(parameter)] for parameter in group["params"]]
        group["params"] = [held[name] for name in called if name in held]


def repeated_modules(model: nn.Module) -> Sequence[nn.Module]:
    """The layers in each outermost `ModuleList`, which it is usual to wrap one by one.

    A stage of a pipeline may have None in the place of a layer.
    """
    found: list[nn.Module] = []
    for child in live_children_of(model):
        if isinstance(child, nn.ModuleList):
            found += [layer for layer in child if layer is not None and any(True for _ in parameters_in(layer))]
        else:
            found += repeated_modules(child)
    return found


def fsdp1(request: Request) -> Training:
    """The training under FSDP1: FULL_SHARD, original parameters, each layer of a list of layers wrapped.

    In a short dtype, parameters and inputs are rounded to it, and gradients are reduced in float32.
    """
    setup = request.setup
    names, optimizer = names_of(request.model), with_optimizer(request)
    layers = {id(layer) for layer in repeated_modules(request.model)}
    mixed = None
    if setup.dtype != "float32":
        mixed = MixedPrecision(param_dtype=dtype_of(setup), reduce_dtype=torch.float32)
    wrapped = FullyShardedDataParallel(
        request.model, auto_wrap_policy=CustomPolicy(lambda module: id(module) in layers), mixed_precision=mixed,
        use_orig_params=True, device_id=request.device,
    )  # fmt: skip
    follow(request, optimizer, names, wrapped)
    parts = Parts(
        model=compiled(wrapped, setup), optimizer=optimizer, part=request.rank, parts=request.world_size,
        clip=lambda largest_norm: wrapped.clip_grad_norm_(largest_norm),  # looked up late, so that recordings see it
        scaler=loss_scaler(setup, device=request.device, made=ShardedGradScaler),
    )  # fmt: skip
    return stepped(request, parts)


def fsdp2(request: Request) -> Training:
    """The training under FSDP2, each layer of a list of layers sharded separately.

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
    parts = Parts(
        model=compiled(model, setup), optimizer=optimizer, part=request.rank, parts=request.world_size
    )  # fmt: skip
    return stepped(request, parts)


def tensor_parallel(request: Request) -> Training:
    """The training with tensor parallelism over all ranks, which all work on the same batch.

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
    parts = Parts(
        model=compiled(model, setup), optimizer=optimizer, clip=partial(_clip_divided, model),
        around=partial(autocast, setup, request.device),
        updating=implicit_replication,  # lets operators mix divided and replicated parameters
    )  # fmt: skip
    return stepped(request, parts)


def _tie_again(request: Request, model: nn.Module, names: ParameterNames) -> None:
    """Restore tied parameters: `parallelize_module` makes new parameters for each module separately.

    Raises:
        ConfigError: The two are divided differently now, so that they cannot be one tensor.
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


def _clip_divided(model: nn.Module, largest_norm: float) -> None:
    """`clip_grad_norm_` for a mix of divided and replicated gradients."""
    parameters = [parameter for parameter in parameters_in(model) if parameter.grad is not None]
    norms = [nn.utils.get_total_norm([parameter.grad]) for parameter in parameters if parameter.grad is not None]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(whole))
    nn.utils.clip_grads_with_norm_(parameters, largest_norm, total, foreach=False)
