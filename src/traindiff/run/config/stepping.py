"""Trainings whose step uses torch's own optimizer loop: on one process, under DDP, and for the sharding engines."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from traindiff.core.torch_compat.training import parameters_in
from traindiff.run.config.precision import autocast, computing_in, loss_scaler
from traindiff.run.config.request import Request
from traindiff.run.config.setup import Setup
from traindiff.run.config.training import Training


def plain(request: Request) -> Training:
    """The training on one process, in the setup's dtype."""
    around = _in_short_dtype(request)
    parts = Parts(model=compiled(request.model, request.setup), optimizer=with_optimizer(request), around=around)
    return stepped(request, parts)


def ddp(request: Request) -> Training:
    """The training under DDP, which exchanges gradients after the last micro-batch of a step."""
    optimizer, around = with_optimizer(request), _in_short_dtype(request)
    wrapped = DistributedDataParallel(request.model)
    parts = Parts(
        model=compiled(wrapped, request.setup), optimizer=optimizer, part=request.rank, parts=request.world_size,
        around=around, unfinished=wrapped.no_sync,
    )  # fmt: skip
    return stepped(request, parts)


def _in_short_dtype(request: Request) -> ContextMaker:
    """The context of each forward pass in the setup's precision; `master` changes the model, and needs none."""
    if request.setup.precision == "master":
        computing_in(request.model, request.setup)
        return nullcontext
    return partial(autocast, request.setup, request.device)


def compiled(model: nn.Module, setup: Setup) -> nn.Module:
    """The model, compiled with `torch.compile` if the setup says so."""
    if not setup.compile:
        return model
    made: nn.Module = torch.compile(model)  # type: ignore[assignment]  # an OptimizedModule, which is a module
    return made


def with_optimizer(request: Request) -> Optimizer:
    """The recipe's optimizer; with `optimizer="engine"`, a new one of the same class that uses torch's fused kernels.

    Raises:
        ConfigError: The class has no fused kernels.
    """
    optimizer = request.optimizer
    if request.setup.optimizer == "torch":
        return optimizer
    made = type(optimizer)
    known = inspect.signature(made).parameters
    if "fused" not in known:
        message = f"is {made.__name__}, which has no fused kernels that optimizer=engine could use."
        raise request.lacks(
            "optimizer", message=message, fix="Use torch.optim's Adam, AdamW, SGD or Adagrad, or optimizer=torch."
        )
    settings = {name: value for name, value in optimizer.defaults.items() if name in known}
    groups = [{**group, "fused": True, "foreach": False} for group in optimizer.param_groups]
    return made(groups, **{**settings, "fused": True, "foreach": False})


Clip = Callable[[float], object]
"""Scales all gradients down to a norm."""

ContextMaker = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The pieces from which `stepped` makes a training step; each engine fills in its own.

    Attributes:
        model: The model that the recipe's loss calls.
        optimizer: Steps the parameters of the model.
        part: Index of the part of each micro-batch on which this rank works.
        parts: Number of such parts.
        clip: The engine's own gradient clipping; None for torch's.
        around: Context of each forward pass, e.g. autocast.
        unfinished: Context of every micro-batch except the last.
        updating: Context of unscaling gradients and of the optimizer's step.
        scaler: Loss scaler; None for the one of the setup.
    """

    model: nn.Module
    optimizer: Optimizer
    part: int = 0
    parts: int = 1
    clip: Clip | None = None
    around: ContextMaker = nullcontext
    unfinished: ContextMaker = nullcontext
    updating: ContextMaker = nullcontext
    scaler: GradScaler | None = None


def stepped(request: Request, parts: Parts) -> Training:
    """The training with a step made of `parts`, which returns this rank's mean loss.

    The step does not return the norm of clipped gradients, because the recording has it anyway.
    """
    setup = request.setup
    scaler = parts.scaler or loss_scaler(setup, device=request.device)

    def step(batch: Any) -> Tensor:
        shares = request.micro_batches(batch, part=parts.part, parts=parts.parts)
        total = torch.zeros((), device=request.device)
        for number, share in enumerate(shares):
            is_last = number == len(shares) - 1
            with nullcontext() if is_last else parts.unfinished():
                with parts.around():
                    loss = request.loss(parts.model, share) / len(shares)
                scaler.scale(loss).backward()
            total += loss.detach()
        if setup.gradient_clipping:
            with parts.updating():
                scaler.unscale_(parts.optimizer)
            if parts.clip is None:
                nn.utils.clip_grad_norm_(parameters_in(parts.model), setup.gradient_clipping)
            else:
                parts.clip(setup.gradient_clipping)
        with parts.updating():
            scaler.step(parts.optimizer)
            scaler.update(setup.loss_scale or None)
        parts.optimizer.zero_grad()
        return total

    return replace(request.training, model=parts.model, optimizer=parts.optimizer, step=step)
