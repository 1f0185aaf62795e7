"""A range of a parameter's elements as a step finds it: what its update is replayed from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import Adam as TorchAdam
from torch.optim import AdamW as TorchAdamW

from traindiff.core.kernels.torch_arrays import is_abstract
from traindiff.core.shards import Piece, Shard
from traindiff.observe.torch.hooks.replay_formulas import Adam, Before, Number, Rule, Sgd, Units

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

    Tensors among the settings are copied, not read: nothing synchronizes.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedRange:
    """Copies, in their own dtypes, of what belongs to a range of a parameter's elements.

    Attributes:
        path: The path of the model's parameter.
        parameter: What the optimizer holds of it, or of several.
        part: The range, in row-major order of `parameter`.
        shard: Which elements of the model's parameter they are.
        rule: What the optimizer says that it does.
        elements: The parameter's.
        gradient: Their gradient; None where a closure has yet to compute it.
        state: Moments of these elements.
        step: The optimizer's count of steps.
        scale: What the gradient is yet to be divided by, where the optimizer sees to that itself (a fused one,
            under a loss scaler).
        overflowed: Whether it was told that the gradients overflowed, so that it leaves the step out.
    """

    path: str
    parameter: Tensor
    part: slice
    shard: Shard
    rule: Rule
    elements: Tensor
    gradient: Tensor | None
    state: dict[str, Tensor]
    step: Tensor
    scale: Tensor | None
    overflowed: Tensor | None

    @property
    def units(self) -> Units:
        """What its numbers are rounded to."""
        tensors = [self.elements, *self.state.values(), *([] if self.gradient is None else [self.gradient])]
        infos = [torch.finfo(tensor.dtype) for tensor in tensors]
        return Units(
            storage=infos[0].eps / 2.0,
            arithmetic=max(info.eps for info in infos) / 2.0,
            tiny=max(info.tiny for info in infos),
        )

    def before(self) -> Before | None:
        """What the step has found, float64; None where a closure gave no gradient to replay.

        Where it was to be computed by a closure, the gradient is the one that is there now.
        """
        gradient = self.gradient
        if gradient is None:
            if self.parameter.grad is None or self.parameter.grad.layout != torch.strided:
                return None
            gradient = _part(self.parameter.grad, self.part)
        gradient = gradient.to(torch.float64)
        if self.scale is not None:
            gradient = gradient / self.scale
        state = {name: moment.to(torch.float64) for name, moment in self.state.items()}
        return Before(parameter=self.elements.to(torch.float64), gradient=gradient, state=state, step=self.step)

    def taken(self) -> Tensor:
        """The elements as they are now minus what they were, float64, flat."""
        return _part(self.parameter, self.part).to(torch.float64) - self.elements.to(torch.float64)

    def unless_overflowed(self, update: Tensor) -> Tensor:
        """The update, or none where the step is left out."""
        return update if self.overflowed is None else torch.where(self.overflowed.bool(), 0.0, update)


def copy_range(
    optimizer: Optimizer, parameter: Tensor, piece: Piece, rule: Rule, part: range, *, has_closure: bool
) -> CopiedRange:
    """Copy a range of a parameter, and what belongs to it.

    Args:
        optimizer: The optimizer.
        parameter: What it holds.
        piece: What that has of one of the model's parameters, as one range.
        rule: What the optimizer says that it does.
        part: Which elements of the piece.
        has_closure: Whether the gradient is yet to be computed.
    """
    state = optimizer.state.get(parameter, {})
    whole = piece.shard or Shard.whole(tuple(parameter.shape))
    flat = Shard(shape=(len(part),), global_shape=whole.global_shape, offset=(whole.start + part.start,))
    within = slice(piece.first + part.start, piece.first + part.stop)
    return CopiedRange(
        path=piece.path,
        parameter=parameter,
        part=within,
        shard=whole if len(part) == whole.size else flat,
        rule=rule,
        elements=_copy(parameter, within),
        gradient=None if has_closure or parameter.grad is None else _copy(parameter.grad, within),
        state={name: _copy(moment, within) for name, moment in moments_of(optimizer, state).items()},
        step=step_of(state),
        scale=_left_with(optimizer, "grad_scale"),
        overflowed=_left_with(optimizer, "found_inf"),
    )


def obstacle(parameter: Tensor, piece: Piece) -> str:
    """Why what an optimizer holds of a parameter cannot be replayed; empty if it can."""
    known = type(parameter.data) is Tensor or (piece.shard is not None and hasattr(parameter, "placements"))
    if not known:
        return f"the parameter is a {type(parameter.data).__name__}"
    if not parameter.is_floating_point():
        return f"the parameter is {str(parameter.dtype).removeprefix('torch.')}"
    if parameter.device.type in ("mps", "meta"):
        return f"there is no float64 on {parameter.device.type}"
    if parameter.grad is not None and is_abstract(parameter.grad):
        return f"the gradient is a {type(parameter.grad).__name__}"
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        return f"the gradient is {str(parameter.grad.layout).removeprefix('torch.')}"
    placements = [getattr(one, "placements", None) for one in (parameter, parameter.grad) if one is not None]
    if placements[0] != placements[-1]:
        return "the gradient is divided otherwise over ranks"
    if piece.shard is not None and not piece.shard.contiguous:
        return "this rank holds a part of it that is no range of its elements"
    return ""


def _copy(tensor: Tensor, part: slice) -> Tensor:
    return _part(tensor, part).clone()


def _part(tensor: Tensor, part: slice) -> Tensor:
    """Elements as they are now, flat; of a DTensor this rank's."""
    held: Any = tensor.detach()
    local: Tensor = held.to_local() if hasattr(held, "to_local") else held
    return local.reshape(-1)[part]


def _left_with(optimizer: Optimizer, name: str) -> Tensor | None:
    """What a loss scaler leaves with an optimizer for the length of a step: a copy, float64."""
    value = getattr(optimizer, name, None)
    return value.detach().to(torch.float64, copy=True) if isinstance(value, Tensor) else None
