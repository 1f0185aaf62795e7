"""Trainings on several ranks that are watched, and go wrong on one of them."""

from __future__ import annotations

import io
import math
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.observe.sharding.deepspeed_training import global_batches, make_engine, step_engine
from tests.observe.sharding.training import Model, adamw

Says = list[list[Any]]


class Breaking(nn.Module):
    """Passes numbers on, until it is told to break, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_factor = self.backward_factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.backward_factor != 1.0 and x.requires_grad:
            x = x * 1.0
            x.register_hook(lambda gradient: gradient * self.backward_factor)
        return x * self.forward_factor


def breaking(model: Model) -> Breaking:
    """Put one behind the first block's activation."""
    model.blocks[0].act = nn.Sequential(model.blocks[0].act, Breaking())
    return model.blocks[0].act[1]


def wrapped(engine: str, model: Model) -> nn.Module:
    if engine == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(engine: str, where: str, on_detect: str, watched: bool = True) -> Says:
    """Three steps, of which the second breaks on rank 1; gives origins, and sums of the parameters."""
    torch.manual_seed(0)
    plain = Model()
    breaks = breaking(plain)
    model = wrapped(engine, plain)
    optimizer = adamw(model.parameters())
    origins: list[traindiff.Origin] = []
    data = torch.Generator().manual_seed(1)
    rank = distributed.get_rank()
    handle: Any = "raise" if on_detect == "raise" else origins.append
    watch = traindiff.watch(model, optimizer, output=None, file=io.StringIO(), on_detect=handle)
    with watch if watched else nullcontext():
        for step in range(3):
            tokens = torch.randint(19, (8, 7), generator=data).chunk(distributed.get_world_size())[rank]
            if rank == 1 and step == 1:
                setattr(breaks, f"{where}_factor", math.nan)
            logits = model(tokens[:, :-1])
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if where == "none":
                continue
    watch.close()
    return [[[one.step, one.rank, one.phase, one.path, one.message] for one in origins], _bits(model)]


def gather_late(engine: Any) -> None:
    """Let what ZeRO stage 3 gathers when it has stepped arrive when `engine.step` returns; until then it is NaN.

    With gloo that can happen: DeepSpeed 0.19 waits for the last of its gathers alone.
    """
    outer, step, gather = engine.optimizer, engine.step, engine.optimizer._post_step
    gathered: list[tuple[nn.Parameter, Tensor]] = []

    def post_step(*args: Any) -> None:
        gather(*args)
        gathered.extend((one, one.data) for one in outer.persistent_parameters)
        for one in outer.persistent_parameters:
            one.data = torch.full_like(one, math.nan)

    def step_and_wait() -> None:
        step()
        assert gathered
        for one, data in gathered:
            one.data = data
        gathered.clear()

    outer._post_step, engine.step = post_step, step_and_wait


def train_engine(stage: int, where: str) -> Says:
    """The same with DeepSpeed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        engine = make_engine(stage)
        breaks = breaking(engine.module)
        if where == "unfinished gather":
            gather_late(engine)
        origins: list[traindiff.Origin] = []
        printed = io.StringIO()
        with traindiff.watch(engine, engine.optimizer, output=None, file=printed, on_detect=origins.append):
            for step, tokens in enumerate(global_batches()):
                if distributed.get_rank() == 1 and step == 1 and where in ("forward", "backward"):
                    setattr(breaks, f"{where}_factor", math.nan)
                step_engine(engine, tokens, 1.0)
    return [[[one.step, one.rank, one.phase, one.path, one.message] for one in origins], [printed.getvalue()]]


def _bits(model: nn.Module) -> list[str]:
    local = (one.to_local() if hasattr(one, "to_local") else one for one in model.parameters())
    return [str(one.detach().view(torch.int32).sum().item()) for one in local]
