"""The formulas of Adagrad, Adadelta and RMSprop. See `formulas` for what formulas are given and return."""

from __future__ import annotations

from typing import Any

from traindiff.observe.torch.replay.rounded import sqrt

ADAGRAD_MISTAKES = (
    "eps-inside-root", "no-root", "state-late", "no-lr-decay", "lr-decay-one-step-ahead", "not-accumulated",
    "averaged-sum", "no-scaling", "sum-of-magnitudes",
)  # fmt: skip


def adagrad(parameter: Any, gradient: Any, state: Any, settings: Any, wrong: str = "") -> Any:
    """The parameter after a step of Adagrad.

        g = grad + weight_decay * p                      (minus grad to maximize)
        s = s + g^2
        p = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)

    Source: Duchi et al., Adaptive Subgradient Methods, JMLR 2011; torch.optim.Adagrad.
    """
    g = _with_decay(parameter, gradient, settings)
    held, t = state.get("sum", settings.get("initial_accumulator_value", 0.0)), state.get("step", 0.0) + 1.0
    total = held + (abs(g) if wrong == "sum-of-magnitudes" else g.square())
    if wrong == "state-late":
        total = held + 0.0 * g
    elif wrong == "not-accumulated":
        total = g.square()
    elif wrong == "averaged-sum":
        total = total / t
    rate = settings["lr"] / (1.0 + (t - (0.0 if wrong == "lr-decay-one-step-ahead" else 1.0)) * settings["lr_decay"])
    if wrong == "no-lr-decay":
        rate = settings["lr"]
    if wrong == "no-scaling":
        return parameter - rate * g
    return parameter - rate * g / _divisor(total, settings["eps"], wrong)


ADADELTA_MISTAKES = (
    "eps-outside-root", "delta-not-used", "state-late", "no-root", "delta-after-update", "swapped-averages",
    "summed-average", "eps-in-divisor-only", "no-scaling",
)  # fmt: skip


def adadelta(parameter: Any, gradient: Any, state: Any, settings: Any, wrong: str = "") -> Any:
    """The parameter after a step of Adadelta.

        g = grad + weight_decay * p                      (minus grad to maximize)
        v = rho * v + (1 - rho) * g^2
        p = p - lr * sqrt(u + eps) / sqrt(v + eps) * g   (u: the same average of earlier updates)

    Source: Zeiler, ADADELTA: An Adaptive Learning Rate Method, arXiv 1212.5701; torch.optim.Adadelta.
    """
    g, rho, eps = _with_decay(parameter, gradient, settings), settings["rho"], settings["eps"]
    held, deltas = state.get("square_avg", 0.0 * g), state.get("acc_delta", 0.0 * g)
    average = rho * held + (1.0 if wrong == "summed-average" else 1.0 - rho) * g.square()
    if wrong == "state-late":
        average = held
    if wrong == "no-scaling":
        return parameter - settings["lr"] * g
    if wrong == "eps-outside-root":
        return parameter - settings["lr"] * ((sqrt(deltas) + eps) / (sqrt(average) + eps) * g)
    if wrong == "no-root":
        return parameter - settings["lr"] * ((deltas + eps) / (average + eps) * g)
    if wrong == "delta-not-used":
        return parameter - settings["lr"] * g / sqrt(average + eps)
    if wrong == "swapped-averages":
        return parameter - settings["lr"] * (sqrt(average + eps) / sqrt(deltas + eps) * g)
    if wrong == "eps-in-divisor-only":
        return parameter - settings["lr"] * (sqrt(deltas) / sqrt(average + eps) * g)
    delta = sqrt(deltas + eps) / sqrt(average + eps) * g
    if wrong == "delta-after-update":
        delta = sqrt(rho * deltas + (1.0 - rho) * delta.square() + eps) / sqrt(average + eps) * g
    return parameter - settings["lr"] * delta


RMSPROP_MISTAKES = (
    "eps-inside-root", "not-centered", "centered", "state-late", "no-momentum", "no-root", "lr-inside-momentum",
    "summed-average", "other-nesterov", "bias-corrected", "averaged-momentum", "centered-late",
)  # fmt: skip


def rmsprop(parameter: Any, gradient: Any, state: Any, settings: Any, wrong: str = "") -> Any:
    """The parameter after a step of RMSprop.

        g = grad + weight_decay * p                      (minus grad to maximize)
        v = alpha * v + (1 - alpha) * g^2;  a = alpha * a + (1 - alpha) * g
        d = g / (sqrt(v - a^2, if centered, else v) + eps)
        p = p - lr * (momentum * b + d)                  (b: this sum in the step before)

    Source: Hinton, lecture 6e of Neural Networks for Machine Learning, 2012; torch.optim.RMSprop.
    """
    g, lr, alpha = _with_decay(parameter, gradient, settings), settings["lr"], settings["alpha"]
    momentum = settings.get("momentum", 0.0)
    held, mean_old = state.get("square_avg", 0.0 * g), state.get("grad_avg", 0.0 * g)
    v = alpha * held + (1.0 if wrong == "summed-average" else 1.0 - alpha) * g.square()
    if wrong == "state-late":
        v = held
    if wrong == "bias-corrected":
        v = v / (1.0 - alpha ** (state.get("step", 0.0) + 1.0))
    if (settings.get("centered") and wrong != "not-centered") or wrong == "centered":
        mean = mean_old if wrong == "centered-late" else alpha * mean_old + (1.0 - alpha) * g
        v = v - mean.square()
    direction = g / _divisor(v, settings["eps"], wrong)
    if momentum and wrong != "no-momentum":
        before = momentum * state.get("momentum_buffer", 0.0 * g)
        if wrong == "lr-inside-momentum":
            return parameter - (before + lr * direction)
        share = 1.0 - momentum if wrong == "averaged-momentum" else 1.0
        buffer = before + share * direction
        direction = direction + momentum * buffer if wrong == "other-nesterov" else buffer
    return parameter - lr * direction


def _with_decay(parameter: Any, gradient: Any, settings: Any) -> Any:
    g = -gradient if settings.get("maximize") else gradient
    decay = settings.get("weight_decay", 0.0)
    return g + decay * parameter if decay else g


def _divisor(v: Any, eps: Any, wrong: str) -> Any:
    if wrong == "eps-inside-root":
        return sqrt(v + eps)
    return (v if wrong == "no-root" else sqrt(v)) + eps
