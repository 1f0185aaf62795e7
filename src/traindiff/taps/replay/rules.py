"""Which formula an optimizer says that it follows, with which settings for which parameter."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import Adam as TorchAdam
from torch.optim import AdamW as TorchAdamW

from traindiff.taps.replay.formulas import Adam, Number, Rule, Sgd

MOMENTS = {"SGD": ("momentum_buffer",), "Adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
"""Entries of the optimizer's state that the formulas read, tensors of the parameter's shape."""


def rule_name(optimizer: Optimizer) -> str:
    """What is replayed: `SGD`, `Adam` or `AdamW`; `NAME(AdamW)` for a subclass with a step of its own; or nothing.

    Such a subclass may do something else on purpose. It calls itself one of these, and is held against that.
    """
    for name, kind in (("SGD", SGD), ("AdamW", TorchAdamW), ("Adam", TorchAdam)):
        if isinstance(optimizer, kind):
            own = inspect.unwrap(type(optimizer).step) is not inspect.unwrap(kind.step)
            return f"{type(optimizer).__name__}({name})" if own else name
    return ""


def rule_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Rule:
    """The formula and settings for the parameters of one group, as the group has them now.

    Tensors among the settings are copied, not read: nothing synchronises.
    """
    if isinstance(optimizer, SGD):
        return Sgd(
            lr=_number(group["lr"]),
            momentum=_number(group["momentum"]),
            dampening=_number(group["dampening"]),
            weight_decay=_number(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group.get("maximize", False)),
        )
    beta1, beta2 = group["betas"]
    return Adam(
        lr=_number(group["lr"]),
        beta1=_number(beta1),
        beta2=_number(beta2),
        eps=_number(group["eps"]),
        weight_decay=_number(group["weight_decay"]),
        decoupled=bool(group.get("decoupled_weight_decay", isinstance(optimizer, TorchAdamW))),
        amsgrad=bool(group["amsgrad"]),
        maximize=bool(group.get("maximize", False)),
        float32_corrections=bool(group.get("capturable", False) or group.get("differentiable", False)),
    )


def moments_of(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The moments that the optimizer has of a parameter so far, as they are."""
    names = MOMENTS["SGD" if isinstance(optimizer, SGD) else "Adam"]
    return {name: state[name] for name in names if isinstance(state.get(name), Tensor)}


def step_of(state: Mapping[str, Any]) -> Tensor:
    """How many steps the optimizer has counted for a parameter: a copy, float64, one element."""
    step = state.get("step", 0.0)
    if isinstance(step, Tensor):
        return step.detach().to(torch.float64, copy=True)
    return torch.tensor(float(step), dtype=torch.float64, device="cpu")


def _number(value: Any) -> Number:
    return value.detach().to(torch.float64, copy=True) if isinstance(value, Tensor) else float(value)
