"""Variants that several engines have: a compiled model, torch's fused optimizers."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.optim import Optimizer

from traindiff.setups.request import Request
from traindiff.setups.setup import Setup


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
        says = f"is {made.__name__}, which has no fused kernels that optimizer=engine could use."
        raise request.lacks(
            "optimizer", says=says, fix="Use torch.optim's Adam, AdamW, SGD or Adagrad, or optimizer=torch."
        )
    settings = {name: value for name, value in optimizer.defaults.items() if name in known}
    groups = [{**group, "fused": True, "foreach": False} for group in optimizer.param_groups]
    return made(groups, **{**settings, "fused": True, "foreach": False})
