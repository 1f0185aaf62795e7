"""What the state of an optimizer should be after a step: moments, sums and averages, as its formula gives them.

An update follows from the state that the step begins with, so a state that is left as it was makes no update wrong
before the next step, and then the update follows from it. So the state after a step is judged by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from traindiff.observe.torch.replay.adam import decayed, moments
from traindiff.observe.torch.replay.batches import Batch
from traindiff.observe.torch.replay.copied_range import CopiedRange, Start, in_roundings, local_part
from traindiff.observe.torch.replay.rounded import Rounded, by_sign, maximum, sqrt

STATES_OF: Mapping[str, Callable[[Start], Mapping[str, Any]]]
"""By the name of a formula: what its state should be after a step, by name; only what is known."""


class JudgedState(NamedTuple):
    """One tensor of the state of each range of a batch, after a step. All tensors are flat and in float64.

    Attributes:
        batch: The ranges.
        name: Its name in the states.
        now: What the states hold.
        before: What they held before the step; None if they were made in this step.
        expected: What the formula gives.
        rounding: What rounding may change of that.
    """

    batch: Batch
    name: str
    now: Tensor
    before: Tensor | None
    expected: Tensor
    rounding: Tensor

    def residual(self) -> Tensor:
        """The difference from what the formula gives, in units of what rounding explains."""
        return in_roundings(self.now - self.expected, self.rounding)

    def kept(self) -> Tensor | None:
        """The same for the value before the step in place of the formula's; None if it was made in this step."""
        return None if self.before is None else in_roundings(self.now - self.before, self.rounding)

    def zero(self) -> Tensor:
        """The same for zeros."""
        return in_roundings(self.now, self.rounding)


def judged_states(
    batch: Batch, state_of: Callable[[Tensor], Mapping[str, Any]], read: Callable[[Tensor], float]
) -> Iterator[JudgedState]:
    """The tensors of states after a step that have a number for each copied element.

    Yields nothing if the step was skipped, or for a sparse gradient, complex elements, and parts of whole matrices.

    Args:
        batch: What the step began with.
        state_of: Gives the state of a parameter after the step.
        read: The number in a tensor of `CopiedRange.scalars`.
    """
    copied, of = batch.whole, STATES_OF.get(batch.whole.formula.name)
    if (
        batch.gradient is None or of is None or copied.terms is not None or copied.divided
        or copied.parameter.is_complex() or (copied.overflowed is not None and read(copied.overflowed))
    ):  # fmt: skip
        return
    start = copied.start(batch.gradient, read, rounded=True)
    may_overflow = copied.may_overflow(start).reshape(-1)
    states = [state_of(one.parameter) for one in batch.ranges]
    for name, found in of(start).items():
        if not isinstance(found, Rounded):
            continue
        expected = torch.as_tensor(found.value).expand(copied.shape).reshape(-1)
        held = [_held(one, state.get(name)) for one, state in zip(batch.ranges, states, strict=True)]
        units = [torch.finfo(one.dtype).eps / 2.0 for one in held if one is not None]
        if not units:
            continue
        # A range without this state is as expected.
        now = torch.cat(
            [
                part if one is None else one.to(torch.float64)
                for one, part in zip(held, batch.parts(expected), strict=True)
            ]
        )
        error = torch.as_tensor(found.error)
        error = error.reshape(-1) if error.dim() else error
        rounding = error + max(copied.unit, *units) * expected.abs() + found.tiny
        before = copied.state.get(name)
        yield JudgedState(
            batch=batch,
            name=name,
            now=now,
            before=None if before is None else before.to(torch.float64),
            expected=expected,
            rounding=torch.where(may_overflow | rounding.isnan(), torch.inf, rounding),
        )


def _held(copied: CopiedRange, value: Any) -> Tensor | None:
    """The elements of a state that belong to a range; None if it has no number for each element."""
    fits = isinstance(value, Tensor) and value.shape == copied.parameter.shape
    return local_part(value, copied.part) if fits else None


def _of_adam(start: Start) -> dict[str, Any]:
    g, _, _ = decayed(start.parameter, start.gradient, start.settings)
    m, v, _ = moments(g, start.state, start.settings, "")
    found = {"exp_avg": m, "exp_avg_sq": v}
    if start.settings.get("amsgrad"):
        found["max_exp_avg_sq"] = maximum(v, start.state.get("max_exp_avg_sq", 0.0))
    return found


def _of_adamax(start: Start) -> dict[str, Any]:
    g, _, _ = decayed(start.parameter, start.gradient, start.settings)
    m, _, _ = moments(g, start.state, start.settings, "")
    norm = maximum(start.settings["betas"][1] * start.state.get("exp_inf", 0.0), abs(g) + start.settings["eps"])
    return {"exp_avg": m, "exp_inf": norm}


def _with_decay(start: Start) -> Any:
    g = -start.gradient if start.settings.get("maximize") else start.gradient
    decay = start.settings.get("weight_decay", 0.0)
    return g + decay * start.parameter if decay else g


def _of_adagrad(start: Start) -> dict[str, Any]:
    held = start.state.get("sum", start.settings.get("initial_accumulator_value", 0.0))
    return {"sum": held + _with_decay(start).square()}


def _of_adadelta(start: Start) -> dict[str, Any]:
    g, rho, eps = _with_decay(start), start.settings["rho"], start.settings["eps"]
    deltas = start.state.get("acc_delta", 0.0 * g)
    average = rho * start.state.get("square_avg", 0.0 * g) + (1.0 - rho) * g.square()
    delta = sqrt(deltas + eps) / sqrt(average + eps) * g
    return {"square_avg": average, "acc_delta": rho * deltas + (1.0 - rho) * delta.square()}


def _of_rmsprop(start: Start) -> dict[str, Any]:
    g, alpha, state = _with_decay(start), start.settings["alpha"], start.state
    v = alpha * state.get("square_avg", 0.0 * g) + (1.0 - alpha) * g.square()
    found = {"square_avg": v}
    if start.settings.get("centered"):
        found["grad_avg"] = mean = alpha * state.get("grad_avg", 0.0 * g) + (1.0 - alpha) * g
        v = v - mean.square()
    if momentum := start.settings.get("momentum", 0.0):
        direction = g / (sqrt(v) + start.settings["eps"])
        found["momentum_buffer"] = momentum * state.get("momentum_buffer", 0.0 * g) + direction
    return found


def _of_sgd(start: Start) -> dict[str, Any]:
    momentum = start.settings.get("momentum", 0.0)
    if not momentum:
        return {}
    g, held = _with_decay(start), start.state.get("momentum_buffer")
    share = 1.0 - start.settings.get("dampening", 0.0)
    return {"momentum_buffer": g + 0.0 if held is None else momentum * held + share * g}


def _of_rprop(start: Start) -> dict[str, Any]:
    shrink, grow = start.settings["etas"]
    g = -start.gradient if start.settings.get("maximize") else start.gradient
    change = g * start.state["prev"] if "prev" in start.state else 0.0 * g
    size = start.state.get("step_size", start.settings["lr"])
    size = by_sign(change, positive=grow, zero=1.0, negative=shrink) * size
    return {
        "step_size": size.clamp(*start.settings["step_sizes"]),
        "prev": by_sign(change, positive=g, zero=g, negative=0.0 * g),
    }


def _of_muon(start: Start) -> dict[str, Any]:
    g, momentum = start.gradient, start.settings["momentum"]
    return {"momentum_buffer": momentum * start.state.get("momentum_buffer", 0.0 * g) + (1.0 - momentum) * g}


STATES_OF = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "FusedAdam", "DeepSpeedCPUAdam"), _of_adam),
    "Adamax": _of_adamax, "Adagrad": _of_adagrad, "Adadelta": _of_adadelta, "RMSprop": _of_rmsprop, "SGD": _of_sgd,
    "Rprop": _of_rprop, "Muon": _of_muon,
}  # fmt: skip
