"""The formulas of SGD and ASGD. See `formulas` for what formulas are given and return."""

from __future__ import annotations

from typing import Any

from traindiff.observe.torch.replay.rounded import by_sign, in_float32

SGD_MISTAKES = (
    "other-nesterov", "no-momentum", "state-one-step-late", "dampened-first-step", "averaged-momentum",
    "lr-inside-momentum", "decay-after-momentum", "lookahead-twice", "normalized-gradient",
)  # fmt: skip


def sgd(parameter: Any, gradient: Any, state: Any, settings: Any, wrong: str = "") -> Any:
    """The parameter after a step of stochastic gradient descent with momentum.

        g = grad + weight_decay * p                      (minus grad to maximize)
        b = momentum * b + (1 - dampening) * g           (b = g in the first step)
        p = p - lr * (g + momentum * b if nesterov else b)

    Source: torch.optim.SGD, after Sutskever et al., On the importance of initialization and
    momentum in deep learning, ICML 2013.
    """
    lr, decay = settings["lr"], settings.get("weight_decay", 0.0)
    momentum, dampening = settings.get("momentum", 0.0), settings.get("dampening", 0.0)
    g = -gradient if settings.get("maximize") else gradient
    if wrong == "normalized-gradient":
        g = g / (g.norm() + 1e-12)
    if decay and wrong != "decay-after-momentum":
        g = g + decay * parameter
    direction = g
    if momentum and wrong != "no-momentum":
        direction = _with_momentum(g, state.get("momentum_buffer"), momentum, dampening, settings, wrong)
    if decay and wrong == "decay-after-momentum":
        direction = direction + decay * parameter
    return parameter - lr * direction


def _with_momentum(g: Any, held: Any, momentum: Any, dampening: Any, settings: Any, wrong: str) -> Any:
    share = 1.0 - momentum if wrong == "averaged-momentum" else 1.0 - dampening
    if held is None:
        buffer = share * g if wrong in ("dampened-first-step", "averaged-momentum") else g
    elif wrong == "lr-inside-momentum":
        return momentum * held / settings["lr"] + g
    else:
        buffer = momentum * held + share * g
    if wrong == "state-one-step-late":
        buffer = 0.0 * g if held is None else held
    nesterov = bool(settings.get("nesterov")) != (wrong == "other-nesterov")
    if wrong == "lookahead-twice":
        return g + momentum * (g + momentum * buffer)
    return g + momentum * buffer if nesterov else buffer


ASGD_MISTAKES = ("decay-term-missing", "averaged-parameter", "eta-not-used", "eta-one-step-late", "lambda-without-eta")


def asgd(parameter: Any, gradient: Any, state: Any, settings: Any, wrong: str = "") -> Any:
    """The parameter after a step of averaged stochastic gradient descent. The average itself is not judged.

        g = grad + weight_decay * p                      (minus grad to maximize)
        p = p * (1 - lambd * eta) - eta * g              (eta = lr in the first step)

    Source: torch.optim.ASGD, after Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992.
    """
    g = -gradient if settings.get("maximize") else gradient
    if decay := settings.get("weight_decay", 0.0):
        g = g + decay * parameter
    eta, lambd = state.get("eta", in_float32(float(settings["lr"]), gradient)), settings["lambd"]
    if wrong == "eta-not-used":
        eta = settings["lr"]
    if wrong == "eta-one-step-late":
        step, lr = state.get("step", 0.0) - 1.0, settings["lr"]
        eta = lr / (1.0 + lambd * lr * step) ** settings["alpha"] if step > 0 else lr
    if wrong == "decay-term-missing":
        return parameter - eta * g
    if wrong == "lambda-without-eta":
        return parameter * (1.0 - lambd) - eta * g
    moved = parameter * (1.0 - lambd * eta) - eta * g
    if wrong == "averaged-parameter" and "ax" in state:
        return state["ax"] + state.get("mu", 1.0) * (moved - state["ax"])
    return moved


RPROP_MISTAKES = (
    "no-backtracking", "no-growth", "no-upper-limit", "factors-swapped", "shrinks-at-zero",
    "gradient-not-dropped", "previous-gradient", "lr-as-step", "magnitude-kept",
)  # fmt: skip


def rprop(parameter: Any, gradient: Any, state: Any, settings: Any, wrong: str = "") -> Any:
    """The parameter after a step of resilient backpropagation.

        change = grad * previous grad
        s = clamp(s * (eta_plus if change > 0, eta_minus if change < 0, else 1), min, max)   (s = lr at first)
        g = 0 if change < 0 else grad                    (minus grad to maximize)
        p = p - sign(g) * s

    Source: torch.optim.Rprop, after Riedmiller and Braun, A direct adaptive method for faster backpropagation
    learning: the RPROP algorithm, 1993.
    """
    shrink, grow = settings["etas"]
    least, most = settings["step_sizes"]
    g = -gradient if settings.get("maximize") else gradient
    change = g * state["prev"] if "prev" in state else 0.0 * g
    if wrong == "factors-swapped":
        shrink, grow = grow, shrink
    grow = 1.0 if wrong == "no-growth" else grow
    size = state.get("step_size", settings["lr"])
    size = by_sign(change, positive=grow, zero=shrink if wrong == "shrinks-at-zero" else 1.0, negative=shrink) * size
    size = size.clamp(least, None if wrong == "no-upper-limit" else most)
    if wrong == "lr-as-step":
        size = settings["lr"]
    dropped = g if wrong == "gradient-not-dropped" else 0.0 * g
    dropped = -1.0 * g if wrong == "no-backtracking" else dropped
    used = by_sign(change, positive=g, zero=g, negative=dropped)
    if wrong == "previous-gradient":
        used = state.get("prev", 0.0 * g)
    return parameter - (used if wrong == "magnitude-kept" else used.sign()) * size
