"""The updates of SGD, Adam and AdamW, in float64, with bounds of their rounding errors.

Pure functions: tensors of one shape in, float64 tensors of that shape out, elementwise, on the device of
the inputs and without synchronizing. NaN and infinities go through as arithmetic takes them.

The rounding bounds are first-order error analyses (Higham, Accuracy and Stability of Numerical Algorithms,
2002, chapter 3): each product, quotient and sum of the formula may err by one unit roundoff of what it is
computed from, so sums that cancel are bounded by the magnitudes of their terms. They hold for every
order in which the elementwise kernels of torch (for-loop, foreach, fused, capturable) do it, in the dtype of
the parameter or in a longer one.

The names of variants are part of the recording format (stage `variant[NAME]`); readers put them into words.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import Adam as TorchAdam
from torch.optim import AdamW as TorchAdamW

Number = float | Tensor
"""A setting: a number, or a tensor with one element, float64."""

OPERATIONS = 4.0
"""The number of roundings in each intermediate result: of two factors, a product and a sum."""

SCALAR_ROUNDOFF = 2.0**-24
"""Unit roundoff of float32, in which capturable optimizers compute their bias corrections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """The values of one parameter before a step: float64, all of one shape.

    Attributes:
        parameter: The parameter.
        gradient: Its gradient, unscaled.
        state: Moments by torch's names for them; without those that do not exist yet.
        step: The number of steps that the optimizer had counted for this parameter; one element.
    """

    parameter: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]
    step: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Unit roundoffs of the optimizer's numbers.

    Attributes:
        storage: Unit roundoff of the parameter.
        arithmetic: The largest of parameter, gradient and state: short dtypes may be computed in themselves.
        tiny: Smallest normal number of these dtypes: the most that underflow may lose.
    """

    storage: float
    arithmetic: float
    tiny: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A replayed update.

    Attributes:
        value: New parameter minus old one.
        rounding: The largest difference of a correct optimizer's update from that, element by element; positive.
    """

    value: Tensor
    rounding: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """Settings of torch's SGD. `late` leaves the gradient of this step out of the buffer that is used."""

    lr: Number
    momentum: Number
    dampening: Number
    weight_decay: Number
    nesterov: bool
    maximize: bool
    late: bool = False

    def replay(self, before: Before, units: Units) -> Update:
        """The update of stochastic gradient descent with momentum.

            g = grad + weight_decay * p                      (minus grad to maximize)
            b = momentum * b + (1 - dampening) * g           (b = g in the first step)
            p = p - lr * (g + momentum * b if nesterov else b)

        Source: torch.optim.SGD, after Sutskever et al., On the importance of initialization and
        momentum in deep learning, ICML 2013.
        """
        u, k, p = units.arithmetic, OPERATIONS, before.parameter
        decay = self.weight_decay * p
        g = (-before.gradient if self.maximize else before.gradient) + decay
        error = u * (before.gradient.abs() + 2.0 * decay.abs())
        direction = g
        held = before.state.get("momentum_buffer")
        if _is_set(self.momentum):
            buffer, terms = g, g.abs()
            if held is not None:
                buffer = self.momentum * held + (1.0 - self.dampening) * g
                terms = self.momentum * held.abs() + (1.0 - self.dampening) * g.abs()
            if self.late:
                buffer = torch.zeros_like(g) if held is None else held
            buffer_error = error + k * u * terms
            if self.nesterov:
                direction = g + self.momentum * buffer
                error = error + self.momentum * buffer_error + k * u * (g.abs() + self.momentum * buffer.abs())
            else:
                direction, error = buffer, buffer_error
        value = -self.lr * direction
        stored = units.storage * (p + value).abs() + units.tiny
        return Update(value=value, rounding=self.lr * (error + k * u * direction.abs()) + stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Settings of torch's Adam and AdamW, and mistakes that another implementation may make.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        decoupled: AdamW's decay of the parameter itself, not added to the gradient.
        amsgrad: Divide by the largest second moment so far.
        maximize: Ascend.
        float32_corrections: Compute bias corrections in float32 (capturable, differentiable).
        corrected: Correct the bias of the moments.
        eps_inside: Add eps under the root.
        eps_uncorrected: Add eps before the second moment's correction.
        late: Use the moments as they were before this step's gradient.
        shift: Added to the step from which bias corrections are computed.
    """

    lr: Number
    beta1: Number
    beta2: Number
    eps: Number
    weight_decay: Number
    decoupled: bool
    amsgrad: bool
    maximize: bool
    float32_corrections: bool = False
    corrected: bool = True
    eps_inside: bool = False
    eps_uncorrected: bool = False
    late: bool = False
    shift: int = 0

    def replay(self, before: Before, units: Units) -> Update:
        """The update of Adam, or of AdamW where decay is decoupled.

            g = grad (+ weight_decay * p, unless decoupled)  (minus grad to maximize)
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g^2
            p = p - lr * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) (+ weight_decay * p, if decoupled))

        With amsgrad v under the root is the largest v so far. Sources: Kingma and Ba, Adam, ICLR 2015,
        algorithm 1; Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2;
        Reddi et al., On the Convergence of Adam and Beyond, ICLR 2018; torch.optim.Adam.
        """
        u, k, p = units.arithmetic, OPERATIONS, before.parameter
        decay = self.weight_decay * p
        g = -before.gradient if self.maximize else before.gradient
        g_error = u * g.abs()
        if not self.decoupled:
            g, g_error = g + decay, u * (g.abs() + 2.0 * decay.abs())
        zero = torch.zeros_like(g)
        m_old, v_old = (before.state.get(name, zero) for name in ("exp_avg", "exp_avg_sq"))
        m = self.beta1 * m_old + (1.0 - self.beta1) * g
        m_error = k * u * (self.beta1 * m_old.abs() + (1.0 - self.beta1) * g.abs()) + (1.0 - self.beta1) * g_error
        v = self.beta2 * v_old + (1.0 - self.beta2) * g.square()
        v_error = k * u * v + (1.0 - self.beta2) * (2.0 * g.abs() * g_error + g_error.square()) + units.tiny
        if self.late:
            m, v = m_old, v_old
        if self.amsgrad:
            v = torch.maximum(v, before.state.get("max_exp_avg_sq", zero))
        first, second = self._corrections(before.step)
        root, root_error = v.sqrt(), (v + v_error).sqrt() - v.sqrt()
        divisor = self._divisor(v, root, second)
        divisor_error = root_error / second**0.5 + (k * u + self._correction_error(second)) * divisor
        size = m.abs() / divisor
        # A divisor that is all error bounds nothing: the quotient may then be anything.
        largest = (m.abs() + m_error) / (divisor - divisor_error).clamp(min=1e-3 * divisor)
        error = largest - size + (k * u + self._correction_error(first)) * size
        scale = self.lr / first
        value = -scale * m / divisor
        error = scale * error
        if self.decoupled:  # torch multiplies the parameter by 1 - lr * weight_decay before it adds the rest
            value = value - self.lr * decay
            error = error + 2.0 * units.storage * p.abs() + k * u * self.lr * decay.abs()
        return Update(value=value, rounding=error + units.storage * (p + value).abs() + units.tiny)

    def _corrections(self, step: Tensor) -> tuple[Number, Number]:
        if not self.corrected:
            return 1.0, 1.0
        t = step + 1.0 + self.shift
        return 1.0 - self.beta1**t, 1.0 - self.beta2**t

    def _correction_error(self, correction: Number) -> Number:
        """Relative error of `1 - beta^t` in float32, a difference that cancels."""
        return OPERATIONS * SCALAR_ROUNDOFF / correction if self.float32_corrections else 0.0

    def _divisor(self, v: Tensor, root: Tensor, correction: Number) -> Tensor:
        if self.eps_inside:
            return (v / correction + self.eps).sqrt()
        if self.eps_uncorrected:
            return (root + self.eps) / correction**0.5
        return root / correction**0.5 + self.eps


Rule = Sgd | Adam
"""The formula and settings by which an optimizer updates one parameter."""


def _is_set(setting: Number) -> bool:
    """True if torch takes a setting into account; it always does so with a tensor."""
    return isinstance(setting, Tensor) or setting != 0.0


BETAS1 = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
BETAS2 = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)
EPSILONS = (1e-5, 1e-6, 1e-7, 1e-8, 1e-10, 1e-12)
MOMENTA = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99)


def variants(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """Yield each known mistake that would change the result of this rule, with its name; the likelier ones first."""
    if isinstance(rule, Adam):
        yield from _of_adam(rule)
    else:
        yield from _of_sgd(rule)
    yield "other-sign", replace(rule, maximize=not rule.maximize)


def _of_adam(rule: Adam) -> Iterator[tuple[str, Adam]]:
    yield "no-bias-correction", replace(rule, corrected=False)
    yield "eps-inside-root", replace(rule, eps_inside=True)
    yield "eps-before-correction", replace(rule, eps_uncorrected=True)
    if _differs(rule.weight_decay, 0.0):
        yield "coupled-decay" if rule.decoupled else "decoupled-decay", replace(rule, decoupled=not rule.decoupled)
        yield "no-decay", replace(rule, weight_decay=0.0)
        if _differs(rule.lr, 0.0):
            yield "decay-without-lr", replace(rule, weight_decay=rule.weight_decay / rule.lr)
    yield "state-one-step-late", replace(rule, late=True, shift=-1)
    yield "state-late", replace(rule, late=True)
    yield "step-one-behind", replace(rule, shift=-1)
    yield "step-one-ahead", replace(rule, shift=1)
    for setting, values in (("beta1", BETAS1), ("beta2", BETAS2), ("eps", EPSILONS)):
        yield from _with_others(rule, setting, values)
    if rule.amsgrad:
        yield "no-amsgrad", replace(rule, amsgrad=False)


def _of_sgd(rule: Sgd) -> Iterator[tuple[str, Sgd]]:
    if _differs(rule.weight_decay, 0.0):
        yield "no-decay", replace(rule, weight_decay=0.0)
    if _differs(rule.momentum, 0.0):
        yield "other-nesterov", replace(rule, nesterov=not rule.nesterov)
        yield "state-one-step-late", replace(rule, late=True)
        yield f"dampening={float(rule.momentum):g}", replace(rule, dampening=rule.momentum)
        yield "dampening=0", replace(rule, dampening=0.0)
    yield from _with_others(rule, "momentum", MOMENTA)


def _with_others(rule: Any, setting: str, values: Iterable[float]) -> Iterator[tuple[str, Any]]:
    """Yield the rule with other values of a setting."""
    for value in values:
        if _differs(getattr(rule, setting), value):
            yield f"{setting}={value:g}", replace(rule, **{setting: value})


def _differs(setting: Number, other: float) -> bool:
    return bool(abs(float(setting) - other) > 1e-6 * max(abs(other), 1e-12))


MOMENTS = {"SGD": ("momentum_buffer",), "Adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
"""Entries of the optimizer's state that the formulas read, tensors of the parameter's shape."""


def rule_name(optimizer: Optimizer) -> str:
    """The formula of an optimizer: `SGD`, `Adam`, `AdamW`; `NAME(AdamW)` for a subclass with its own step; or empty.

    A subclass with its own step may compute something else on purpose. It is compared with the class that it extends.
    """
    for name, kind in (("SGD", SGD), ("AdamW", TorchAdamW), ("Adam", TorchAdam)):
        if isinstance(optimizer, kind):
            own = inspect.unwrap(type(optimizer).step) is not inspect.unwrap(kind.step)
            return f"{type(optimizer).__name__}({name})" if own else name
    return ""


def rule_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Rule:
    """The formula and the current settings for the parameters of one group.

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
    """The moments that the optimizer keeps of a parameter so far, not copied."""
    names = MOMENTS["SGD" if isinstance(optimizer, SGD) else "Adam"]
    return {name: state[name] for name in names if isinstance(state.get(name), Tensor)}


def step_of(state: Mapping[str, Any]) -> Tensor:
    """The number of steps that the optimizer has counted for a parameter: a copy, float64, one element."""
    step = state.get("step", 0.0)
    if isinstance(step, Tensor):
        return step.detach().to(torch.float64, copy=True)
    return torch.tensor(float(step), dtype=torch.float64, device="cpu")


def _number(value: Any) -> Number:
    return value.detach().to(torch.float64, copy=True) if isinstance(value, Tensor) else float(value)
