"""A step of a training with torch's own means: micro-batches, loss scale, clipping, optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.run.config.precision import LossScaler, loss_scaler
from traindiff.run.config.request import Request
from traindiff.run.config.setup import Setup
from traindiff.run.config.training import Training


def compiled(model: nn.Module, setup: Setup) -> nn.Module:
    """The model as `torch.compile` gives it, where the setup says so."""
    if not setup.compile:
        return model
    made: nn.Module = torch.compile(model)  # type: ignore[assignment]  # an OptimizedModule, which is a module
    return made


def with_optimizer(request: Request) -> Optimizer:
    """The recipe's optimizer; with `optimizer="engine"`, one of the same class that steps in torch's fused kernels.

    Raises:
        ConfigError: Its class has no fused kernels.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a step is made of under one engine.

    Attributes:
        model: What the recipe's loss calls.
        optimizer: Steps its parameters.
        part: Which part of each micro-batch this rank works on.
        parts: Among how many.
        clip: The engine's own way to clip, where it has one.
        around: Entered for a loss: the dtype in which it is computed.
        unfinished: Entered for micro-batches but the last.
        updating: Entered when gradients are unscaled and the optimizer steps.
        scaler: Of a loss that is scaled.
    """

    model: nn.Module
    optimizer: Optimizer
    part: int = 0
    parts: int = 1
    clip: Clip | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    unfinished: Callable[[], AbstractContextManager[Any]] = nullcontext
    updating: Callable[[], AbstractContextManager[Any]] = nullcontext
    scaler: LossScaler | None = None


def stepped(request: Request, parts: Parts) -> Training:
    """The training whose step does with `parts` what the setup says.

    It returns this rank's mean loss. The norm of gradients that are clipped is in the recording anyway.
    """
    setup = request.setup
    scaler = parts.scaler or loss_scaler(setup, parts.optimizer, device=request.device)
    clip = parts.clip or partial(_clip, parts.model)

    def step(batch: Any) -> Tensor:
        shares = request.micro_batches(batch, part=parts.part, parts=parts.parts)
        total = torch.zeros((), device=request.device)
        for number, share in enumerate(shares):
            is_last = number == len(shares) - 1
            with nullcontext() if is_last else parts.unfinished():
                with parts.around():
                    loss = request.loss(parts.model, share) / len(shares)
                scaler.backward(loss)
            total += loss.detach()
        if setup.gradient_clipping:
            with parts.updating():
                scaler.unscale()
            clip(setup.gradient_clipping)
        with parts.updating():
            scaler.step()
        parts.optimizer.zero_grad()
        return total

    return replace(request.training, model=parts.model, optimizer=parts.optimizer, step=step)


def _clip(model: nn.Module, largest_norm: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), largest_norm)
