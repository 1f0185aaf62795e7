"""The engines: what each can say of a training that it has divided among ranks. One entry each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.core.shards import Region, Shard
from traindiff.observe.torch.sharding import distributed_tensor as reducing_ranks
from traindiff.observe.torch.sharding.deepspeed_optimizer import (
    EngineOptimizer,
    engine_settings,
    find_optimizers,
    kept_by_zero,
    shape_before_zero,
)
from traindiff.observe.torch.sharding.distributed_tensor import kept_of_distributed
from traindiff.observe.torch.sharding.flat_parameters import FlatParameter, find_flat_parameters

Optimizers = Mapping[str, Optimizer | EngineOptimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What an engine can say; what it leaves out is as without it. No function imports it, or calls a collective.

    Attributes:
        name: As `run.json` has it.
        reducing_ranks: Over which ranks the gradients of a model are reduced, in order; None if it is none of its own.
        kept: What this rank keeps of a tensor and where that lies; None if it is none of its own.
        global_shape: The shape of a parameter that has another one here; None if it is none of its own.
        flat_parameters: The tensors in which it keeps several parameters of a model.
        optimizers: The optimizers to follow for a model, those that were given and canonical paths of parameters by id.
        settings: What of its settings changes numbers, for `run.json`; None if the model is none of its own.
    """

    name: str
    reducing_ranks: Callable[[nn.Module], Sequence[int] | None] = lambda _: None
    kept: Callable[[Tensor], tuple[Tensor, Region | Shard] | None] = lambda _: None
    global_shape: Callable[[Tensor], tuple[int, ...] | None] = lambda _: None
    flat_parameters: Callable[[nn.Module], Sequence[FlatParameter]] = lambda _: ()
    optimizers: Callable[[nn.Module, Optimizers, Mapping[int, str]], Optimizers] = lambda _, given, __: given
    settings: Callable[[nn.Module], dict[str, Any] | None] = lambda _: None


ENGINES: tuple[Engine, ...] = (
    Engine(
        name="DeepSpeedEngine",
        reducing_ranks=reducing_ranks.of_deepspeed,
        kept=kept_by_zero,
        global_shape=shape_before_zero,
        optimizers=find_optimizers,
        settings=engine_settings,
    ),
    Engine(name="DistributedDataParallel", reducing_ranks=reducing_ranks.of_data_parallel),
    Engine(
        name="FullyShardedDataParallel",
        reducing_ranks=reducing_ranks.of_fsdp1,
        flat_parameters=find_flat_parameters,
    ),
    # FSDP2, and with it whatever else makes DTensors: tensor and sequence parallelism.
    Engine(name="fully_shard", reducing_ranks=reducing_ranks.of_fsdp2, kept=kept_of_distributed),
)
"""In the order in which they are asked: the first that knows a model or a tensor has it."""
