"""The update of a step of LBFGS, which is a function of all parameters together and of the steps before.

A call of `step` makes several iterations. Each moves the parameters by t d, and the next one keeps that move in the
history of the optimizer (`old_stps`), with the change of the gradient (`old_dirs`). So the moves of all iterations but
the last are in the history after the call, and the last one is computed here: its direction from the history and the
latest gradient, and its length from the settings. A line search evaluates the loss at several lengths; then the length
is the one that the optimizer has chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from traindiff.observe.torch.replay.copied_range import Update
from traindiff.observe.torch.replay.formulas import has_own_step

DEVIATIONS = 6.0
"""How many standard deviations of its measured noise an element of a direction may be off."""

DRAWS = 3
"""The number of times that the noise is drawn."""

WORK = 2**26
"""The most elements of a history that is replayed."""

UNCERTAIN = 0.01
"""Relative difference from `tolerance_change` within which rounding decides."""

LBFGS_MISTAKES = ("no-history", "history-unscaled")


@dataclass(frozen=True, slots=True, kw_only=True)
class LbfgsStart:
    """What a call of `step` starts from.

    Attributes:
        parameters: The optimizer's parameters.
        copies: Copies of them, flat.
        steps: The moves that its history held. They are never written to, so they are not copied.
        iterations: The number of iterations so far.
    """

    parameters: Sequence[Tensor]
    copies: Sequence[Tensor]
    steps: Sequence[Tensor]
    iterations: int


def is_lbfgs(optimizer: Optimizer) -> bool:
    """True for torch's LBFGS with torch's own `step`."""
    return isinstance(optimizer, LBFGS) and not has_own_step(type(optimizer), LBFGS)


def why_not(optimizer: Optimizer) -> str:
    """The reason why a step of LBFGS cannot be replayed; empty if it can."""
    held: list[Tensor] = optimizer.param_groups[0]["params"]
    size = sum(one.numel() for one in held) * (2 * int(optimizer.param_groups[0]["history_size"]) + 2)
    if any(type(one.data) is not Tensor or one.dtype not in (torch.float32, torch.float64) for one in held):
        return "LBFGS is replayed for whole parameters in float32 or float64 only"
    if len({(one.device, one.dtype) for one in held}) > 1:
        return "its parameters are on several devices, or of several dtypes"
    if size > WORK:
        return f"LBFGS keeps a history of up to {size:,} elements, and at most {WORK:,} are replayed"
    return ""


def lbfgs_start(optimizer: Optimizer) -> LbfgsStart:
    """Copy what a step starts from."""
    held: list[Tensor] = optimizer.param_groups[0]["params"]
    state = _state(optimizer)
    return LbfgsStart(
        parameters=held,
        copies=[one.detach().reshape(-1).clone() for one in held],
        steps=[*(state.get("old_stps") or ())],
        iterations=int(state.get("n_iter", 0)),
    )


def _update(optimizer: Optimizer, start: LbfgsStart, wrong: str) -> Update | str:
    """The update of the step that began with `start` and has ended, over all parameters; or why it is not known.

    Sources: Nocedal and Wright, Numerical Optimization, 2006, algorithm 7.4; torch.optim.LBFGS.

    Args:
        optimizer: The optimizer.
        start: What its step began with.
        wrong: The name of a mistake.
    """
    group, state = optimizer.param_groups[0], _state(optimizer)
    count = int(state.get("n_iter", 0)) - start.iterations
    before = {id(one) for one in start.steps}
    steps: list[Tensor] = [one for one in state.get("old_stps") or () if id(one) not in before]
    size = sum(one.numel() for one in start.copies)
    zero = start.copies[0].new_zeros(size, dtype=torch.float64)
    info = torch.finfo(start.copies[0].dtype)
    unit = info.eps / (1.0 if info.bits == 64 else 2.0)  # the replay itself rounds to float64
    if count == 0:
        return Update(value=zero, rounding=zero + torch.finfo(torch.float64).tiny)
    if len(steps) != count - (start.iterations == 0):
        return "its history leaves out an iteration of this step"
    if start.iterations:
        steps = steps[1:]  # the last move of the step before
    gradient, dirs, stps = state["prev_flat_grad"], state["old_dirs"], state["old_stps"]
    direction = _direction(gradient.double(), dirs, stps, wrong, noise=None)
    spread = zero.clone()
    generator = torch.Generator(device=zero.device).manual_seed(0)
    for _ in range(DRAWS):
        drawn = _direction(gradient, dirs, stps, wrong, noise=(unit, generator))
        spread += (drawn.double() - direction).square_().div_(DRAWS)
    length = _length(group, state, gradient, is_first=int(state["n_iter"]) == 1)
    slope, least = float(torch.dot(gradient.double(), direction)), -float(group["tolerance_change"])
    if abs(slope - least) < UNCERTAIN * abs(least):
        return "whether its last iteration moves is a matter of rounding"
    if slope > least:
        length = 0.0  # the iteration ends before it moves
    value, magnitude = length * direction, torch.cat([one.double().abs() for one in start.copies])
    # The noise of single elements is drawn too seldom; what all of them have together is a lower bound of each.
    rounding = DEVIATIONS * abs(length) * (spread.sqrt().maximum(spread.mean().sqrt()) + unit * direction.abs())
    for one in steps:
        value = value + one.double()
        magnitude = magnitude.maximum(one.double().abs())
    stored = 2.0 * unit * (len(steps) + 1) * (magnitude + value.abs()) + info.tiny
    return Update(value=value, rounding=rounding + stored)


def lbfgs_stages(optimizer: Optimizer, start: LbfgsStart, *, better: float) -> dict[str, Tensor] | str:
    """What is recorded of a step that has ended: by stage, a tensor over all parameters; or why it is not replayed.

    Args:
        optimizer: The optimizer.
        start: What its step began with.
        better: A mistake is recorded if its residual (RMS) is less than this share of the right formula's.
    """
    update = _update(optimizer, start, "")
    if isinstance(update, str):
        return update
    now = (one.detach().reshape(-1) for one in start.parameters)
    taken = torch.cat([new.double() - old.double() for new, old in zip(now, start.copies, strict=True)])
    found = update.stages(taken)
    residual = found["residual"]
    if float(residual.abs().nan_to_num(nan=0.0).max()) > 1.0:
        for name in LBFGS_MISTAKES:
            other = _update(optimizer, start, name)
            if not isinstance(other, str):
                left = other.residual(taken)
                if float(left.square().mean()) < better**2 * float(residual.square().mean()):
                    found[f"variant[{name}]"] = left
    return found


def _state(optimizer: Optimizer) -> Mapping[str, Any]:
    """LBFGS keeps one state, as that of its first parameter."""
    state: Mapping[str, Any] = optimizer.state.get(optimizer.param_groups[0]["params"][0], {})
    return state


def _direction(
    gradient: Tensor,
    dirs: Sequence[Tensor],
    stps: Sequence[Tensor],
    wrong: str,
    *,
    noise: tuple[float, torch.Generator] | None,
) -> Tensor:
    """The two-loop recursion, in the dtype of `gradient`; with noise, from numbers disturbed within their rounding."""

    def given(one: Tensor) -> Tensor:
        one = one.to(gradient.dtype)
        if noise is None:
            return one
        unit, generator = noise
        return one * (1.0 + unit * (2.0 * torch.rand(one.shape, generator=generator, device=one.device) - 1.0))

    q = -given(gradient)
    if wrong == "no-history" or not dirs:
        return q
    pairs = [(given(y), given(s)) for y, s in zip(dirs, stps, strict=True)]
    factors = [1.0 / torch.dot(y, s) for y, s in pairs]
    shares: list[Tensor] = []
    for (y, s), factor in zip(reversed(pairs), reversed(factors), strict=True):
        shares.append(torch.dot(s, q) * factor)
        q = q - shares[-1] * y
    y, s = pairs[-1]
    r = q if wrong == "history-unscaled" else q * (torch.dot(y, s) / torch.dot(y, y))
    for (y, s), factor, share in zip(pairs, factors, reversed(shares), strict=True):
        r = r + s * (share - torch.dot(y, r) * factor)
    return r


def _length(group: Mapping[str, Any], state: Mapping[str, Any], gradient: Tensor, *, is_first: bool) -> float:
    """The length of the last move: by the settings, or with a line search, the one that the optimizer has chosen."""
    if group["line_search_fn"] is not None:
        return float(state["t"])
    lr = float(group["lr"])
    return min(1.0, 1.0 / float(gradient.double().abs().sum())) * lr if is_first else lr
