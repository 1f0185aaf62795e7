"""The engines that divide a training among ranks, one entry each, and the questions that they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from traindiff.core.kernels.torch_arrays import name_of_dtype
from traindiff.core.shards import Region, Shard
from traindiff.core.site import canonical_path, enclosing
from traindiff.core.summary import rounding
from traindiff.core.torch_compat.training import (
    compressed_to,
    divisor_of,
    is_fully_sharded,
    modules_by_name,
    modules_in,
    reduction_dtype,
    replicating_group,
)
from traindiff.observe.torch.sharding.deepspeed_optimizer import (
    EngineOptimizer,
    engine_settings,
    find_engine,
    find_optimizers,
    kept_by_zero,
    shape_before_zero,
)
from traindiff.observe.torch.sharding.distributed_tensor import kept_of_distributed, sharding_meshes
from traindiff.observe.torch.sharding.flat_parameters import FlatParameter, find_flat_parameters

Optimizers = Mapping[str, Optimizer | EngineOptimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The questions that an engine answers; a default answer means that it changes nothing.

    No function imports the engine or calls a collective.

    Attributes:
        name: As `run.json` has it.
        reducing_ranks: The ranks over which the gradients of a model are reduced, in order; None for other models.
        kept: This rank's part of a tensor, and where it lies; None for other tensors.
        global_shape: The global shape of a parameter whose local shape differs; None for other parameters.
        flat_parameters: The tensors that each hold several parameters of a model.
        optimizers: The optimizers to follow, from the model, the given optimizers, and paths of parameters by id.
        divisor: Reads the number by which gradients of a module's parameters are divided that were added up over ranks,
            also of modules inside that do not answer: None if it is the number of ranks. None for other modules.
        settings: The settings that change numbers, for `run.json`; None for other models.
        reduction_dtype: The dtype to which gradients of a module's parameters are converted before they are reduced,
            also of modules inside that do not answer; None for other modules, and where nothing is converted.
    """

    name: str
    reducing_ranks: Callable[[nn.Module], Sequence[int] | None] = lambda _: None
    kept: Callable[[Tensor], tuple[Tensor, Region | Shard] | None] = lambda _: None
    global_shape: Callable[[Tensor], tuple[int, ...] | None] = lambda _: None
    flat_parameters: Callable[[nn.Module], Sequence[FlatParameter]] = lambda _: ()
    optimizers: Callable[[nn.Module, Optimizers, Mapping[int, str]], Optimizers] = lambda _, given, __: given
    divisor: Callable[[nn.Module], Callable[[], float | None] | None] = lambda _: None
    settings: Callable[[nn.Module], dict[str, Any] | None] = lambda _: None
    reduction_dtype: Callable[[nn.Module], torch.dtype | None] = lambda _: None


def _of_deepspeed(model: nn.Module) -> list[int] | None:
    engine = find_engine(model)
    return None if engine is None else distributed.get_process_group_ranks(engine.data_parallel_group)


def _dtype_of_deepspeed(module: nn.Module) -> torch.dtype | None:
    found = getattr(find_engine(module), "communication_data_type", None)
    return found if isinstance(found, torch.dtype) else None


def _dtype_of_fsdp2(module: nn.Module) -> torch.dtype | None:
    return reduction_dtype(module) if is_fully_sharded(module) else None


def _dtype_of_wrapper(name: str, module: nn.Module) -> torch.dtype | None:
    if type(module).__qualname__ != name:
        return None
    policy: Any = getattr(module, "mixed_precision", None)
    return compressed_to(module) if policy is None else policy.reduce_dtype


def _of_fsdp2(model: nn.Module) -> list[int] | None:
    return next((mesh.mesh.flatten().tolist() for mesh in sharding_meshes(model)), None)


def _divisor_of_fsdp2(module: nn.Module) -> Callable[[], float | None] | None:
    return divisor_of(module) if is_fully_sharded(module) else None


def _of_wrapper(name: str, model: nn.Module) -> list[int] | None:
    """For FSDP1 with copies: the ranks among which it shards, and their copies."""
    for module in modules_in(model):
        if type(module).__qualname__ == name:
            group: Any = module.process_group
            ranks, copies = distributed.get_process_group_ranks(group), replicating_group(module)
            if copies is None:
                return ranks
            own = distributed.get_rank()
            return [copy + rank - own for copy in distributed.get_process_group_ranks(copies) for rank in ranks]
    return None


ENGINES: tuple[Engine, ...] = (
    Engine(
        name="DeepSpeedEngine",
        reducing_ranks=_of_deepspeed,
        kept=kept_by_zero,
        global_shape=shape_before_zero,
        optimizers=find_optimizers,
        settings=engine_settings,
        reduction_dtype=_dtype_of_deepspeed,
    ),
    Engine(
        name="DistributedDataParallel",
        reducing_ranks=partial(_of_wrapper, "DistributedDataParallel"),
        reduction_dtype=partial(_dtype_of_wrapper, "DistributedDataParallel"),
    ),
    Engine(
        name="FullyShardedDataParallel",
        reducing_ranks=partial(_of_wrapper, "FullyShardedDataParallel"),
        flat_parameters=find_flat_parameters,
        reduction_dtype=partial(_dtype_of_wrapper, "FullyShardedDataParallel"),
    ),
    # FSDP2, and everything else that makes DTensors: tensor and sequence parallelism.
    Engine(
        name="fully_shard",
        reducing_ranks=_of_fsdp2,
        kept=kept_of_distributed,
        divisor=_divisor_of_fsdp2,
        reduction_dtype=_dtype_of_fsdp2,
    ),
)
"""In the order in which they are asked; the first that does not answer None is right."""


def reduction_dtypes(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """By path: the dtype in which an engine reduces the gradient of a parameter, where it rounds more than its own.

    Args:
        model: The root module.
        parameters: By canonical path.
    """
    by_module = {
        canonical_path(name): dtype
        for name, module in modules_by_name(model).items()
        for engine in ENGINES
        if (dtype := engine.reduction_dtype(module)) is not None
    }
    if not by_module:
        return {}
    found: dict[str, str] = {}
    for path, parameter in parameters.items():
        own = parameter.dtype
        dtype = next((by_module[module] for module in enclosing(path)[1:] if module in by_module), own)
        reduced_in = name_of_dtype(dtype)
        if rounding(reduced_in) > rounding(name_of_dtype(own)):
            found[path] = reduced_in
    return found
