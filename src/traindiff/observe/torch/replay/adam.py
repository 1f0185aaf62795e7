"""The formulas of Adam, AdamW, SparseAdam, Adamax, NAdam and RAdam. See `formulas` for what they are given."""

from __future__ import annotations

from typing import Any

from traindiff.observe.torch.replay.rounded import by_sign, in_float32, maximum, sqrt

CORRECTIONS = ("no-bias-correction", "first-correction-missing", "second-correction-missing")

LATE = ("state-one-step-late", "state-late", "first-moment-late", "second-moment-late")

MOMENTS = ("no-first-moment", "summed-first-moment", "summed-second-moment", "centered-second-moment", "swapped-betas")

ADAM_MISTAKES = (
    *CORRECTIONS, "eps-inside-root", "eps-before-correction", "second-correction-outside-root", "swapped-corrections",
    "no-root", "no-second-moment", "nesterov", *LATE, *MOMENTS, "second-moment-of-update", "decay-after-step",
)  # fmt: skip


def adam(parameter: Any, gradient: Any, state: Any, settings: Any, wrong: str = "") -> Any:
    """The parameter after a step of Adam, or of AdamW where weight decay is decoupled.

        g = grad (+ weight_decay * p, unless decoupled)  (minus grad to maximize)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2
        p = p * (1 - lr * weight_decay, if decoupled) - lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    With amsgrad v under the root is the largest v so far. Sources: Kingma and Ba, Adam, ICLR 2015,
    algorithm 1; Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2;
    Reddi et al., On the Convergence of Adam and Beyond, ICLR 2018; torch.optim.Adam.
    """
    lr, eps, (beta1, beta2) = settings["lr"], settings["eps"], settings["betas"]
    g, parameter, finished = decayed(parameter, gradient, settings, after=wrong == "decay-after-step")
    m, v, t = moments(g, state, settings, wrong)
    if settings.get("amsgrad"):
        v = maximum(v, state.get("max_exp_avg_sq", 0.0))
    first, second = _corrections(t, settings, wrong)
    if wrong == "second-moment-of-update":
        v = beta2 * state.get("exp_avg_sq", 0.0) + (1.0 - beta2) * m.square()
    root = sqrt(v)
    if wrong == "eps-inside-root":
        divisor = sqrt(v / second + eps)
    elif bool(settings.get("eps_uncorrected")) != (wrong in ("eps-before-correction", "eps-after-correction")):
        divisor = (root + eps) / second**0.5
    elif wrong == "second-correction-outside-root":
        divisor = root / second + eps
    elif wrong == "no-root":
        divisor = v / second + eps
    elif wrong == "no-second-moment":
        divisor = 1.0
    else:
        divisor = root / second**0.5 + eps
    if wrong == "nesterov":
        m = beta1 * m + (1.0 - beta1) * g
    return finished(parameter - lr / first * m / divisor)


SPARSE_ADAM_MISTAKES = (
    *(name for name in ADAM_MISTAKES if name not in ("eps-before-correction", "decay-after-step")),
    "eps-after-correction", "rows-without-gradient-move",
)  # fmt: skip


def sparse_adam(parameter: Any, gradient: Any, state: Any, settings: Any, wrong: str = "") -> Any:
    """The parameter after a step of SparseAdam: Adam for the rows that have a gradient; others do not move.

    `state["touched"]` is 1 in these rows, else 0. eps is added before the bias of the second moment is corrected.
    Source: torch.optim.SparseAdam.
    """
    moved = adam(0.0 * parameter, gradient, state, {**settings, "eps_uncorrected": True}, wrong)
    return parameter + moved * (1.0 if wrong == "rows-without-gradient-move" else state.get("touched", 1.0))


ADAMAX_MISTAKES = (
    *CORRECTIONS[:1], "state-late", "state-one-step-late", *MOMENTS[:2], "swapped-betas", "eps-in-divisor",
    "norm-corrected", "norm-late", "no-maximum", "euclidean-norm",
)  # fmt: skip


def adamax(parameter: Any, gradient: Any, state: Any, settings: Any, wrong: str = "") -> Any:
    """The parameter after a step of Adamax, Adam with the infinity norm.

        g = grad + weight_decay * p                      (minus grad to maximize)
        m = beta1 * m + (1 - beta1) * g
        u = max(beta2 * u, |g| + eps)
        p = p - lr / (1 - beta1^t) * m / u

    Source: Kingma and Ba, Adam, ICLR 2015, algorithm 2; torch.optim.Adamax.
    """
    lr, eps, (_, beta2) = settings["lr"], settings["eps"], _betas(settings, wrong)
    g, parameter, finished = decayed(parameter, gradient, settings)
    m, _, t = moments(g, state, settings, wrong)
    held = state.get("exp_inf", 0.0)
    size = abs(g) + (0.0 if wrong == "eps-in-divisor" else eps)
    norm = maximum(beta2 * held, size)
    if wrong == "no-maximum":
        norm = beta2 * held + (1.0 - beta2) * size
    elif wrong == "euclidean-norm":
        norm = sqrt(beta2 * held * held + (1.0 - beta2) * size * size)
    elif wrong in ("norm-late", "state-late", "state-one-step-late"):
        norm = held + 0.0 * g
    if wrong == "eps-in-divisor":
        norm = norm + eps
    if wrong == "norm-corrected":
        norm = norm / (1.0 - beta2**t)
    first, _ = _corrections(t, settings, wrong)
    return finished(parameter - lr / first * m / norm)


NADAM_MISTAKES = (
    "no-bias-correction", "second-correction-missing", "eps-inside-root", "eps-before-correction", "no-nesterov",
    "no-momentum-schedule", "schedule-one-step-late", "schedule-product-late", "no-gradient-term", *LATE, *MOMENTS,
    "decay-after-step",
)  # fmt: skip


def nadam(parameter: Any, gradient: Any, state: Any, settings: Any, wrong: str = "") -> Any:
    """The parameter after a step of NAdam, Adam with Nesterov momentum.

        mu_t = beta1 * (1 - 0.96^(t * momentum_decay) / 2);  product = mu_1 * ... * mu_t
        m, v as in Adam;  d = sqrt(v / (1 - beta2^t)) + eps
        p = p - lr * (1 - mu_t) / (1 - product) * g / d - lr * mu_(t+1) / (1 - product * mu_(t+1)) * m / d

    Source: Dozat, Incorporating Nesterov Momentum into Adam, ICLR workshop 2016; torch.optim.NAdam.
    """
    lr, eps, (beta1, _) = settings["lr"], settings["eps"], settings["betas"]
    g, parameter, finished = decayed(parameter, gradient, settings, after=wrong == "decay-after-step")
    m, v, t = moments(g, state, settings, wrong)
    _, second = _corrections(t, settings, wrong)
    mu, following = (
        beta1 * (1.0 - 0.5 * 0.96 ** ((t + ahead - (wrong == "schedule-one-step-late")) * settings["momentum_decay"]))
        for ahead in (0.0, 1.0)
    )
    if wrong == "no-momentum-schedule":
        mu = following = beta1
    held = state.get("mu_product", in_float32(1.0, gradient))
    product = held if wrong == "schedule-product-late" else held * mu
    divisor = _divisor(v, second, eps, wrong)
    if wrong == "no-nesterov":
        return finished(parameter - lr / (1.0 - beta1**t) * m / divisor)
    of_gradient, of_moment = lr * (1.0 - mu), lr * following
    if wrong != "no-bias-correction":
        of_gradient, of_moment = of_gradient / (1.0 - product), of_moment / (1.0 - product * following)
    if wrong == "no-gradient-term":
        return finished(parameter - of_moment * m / divisor)
    return finished(parameter - of_gradient * g / divisor - of_moment * m / divisor)


RADAM_MISTAKES = (
    *CORRECTIONS, "no-rectification", "always-rectified", "rectification-squared", "unrectified-lr-missing",
    "eps-inside-root", "eps-after-correction", *LATE, *MOMENTS, "decay-after-step",
)  # fmt: skip


def radam(parameter: Any, gradient: Any, state: Any, settings: Any, wrong: str = "") -> Any:
    """The parameter after a step of RAdam, Adam with a rectified variance.

        rho = 2 / (1 - beta2) - 1;  rho_t = rho - 2 t beta2^t / (1 - beta2^t);  m and v as in Adam
        r = sqrt((rho_t - 4) (rho_t - 2) rho / ((rho - 4) (rho - 2) rho_t)) * sqrt(1 - beta2^t) / (sqrt(v) + eps)
        p = p - lr * m / (1 - beta1^t) * (r if rho_t > 5 else 1)

    Source: Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, ICLR 2020; torch.optim.RAdam.
    """
    lr, eps, (_, beta2) = settings["lr"], settings["eps"], settings["betas"]
    g, parameter, finished = decayed(parameter, gradient, settings, after=wrong == "decay-after-step")
    m, v, t = moments(g, state, settings, wrong)
    first, second = _corrections(t, settings, wrong)
    longest = 2.0 / (1.0 - beta2) - 1.0
    length = longest - 2.0 * t * beta2**t / (1.0 - beta2**t)
    square = (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)
    square = maximum(square, 0.0) + 0.0
    rectification = square if wrong == "rectification-squared" else square**0.5
    if wrong == "no-rectification":
        rectification = 1.0
    if wrong == "eps-inside-root":
        scale = 1.0 / sqrt(v / second + eps)
    elif wrong == "eps-after-correction":
        scale = 1.0 / (sqrt(v / second) + eps)
    else:
        scale = second**0.5 / (sqrt(v) + eps)
    plain = 1.0 / lr if wrong == "unrectified-lr-missing" else 1.0
    if wrong in ("always-rectified", "no-rectification"):
        factor = rectification * scale
    else:
        factor = by_sign(length - 5.0, positive=rectification * scale, zero=plain, negative=plain)
    return finished(parameter - m / first * lr * factor)


def decayed(parameter: Any, gradient: Any, settings: Any, *, after: bool = False) -> tuple[Any, Any, Any]:
    """Gradient and parameter after weight decay, and what is left to do with the new parameter."""
    decay = settings.get("weight_decay", 0.0)
    g = -gradient if settings.get("maximize") else gradient
    if not decay:
        return g, parameter, _as_it_is
    if not settings.get("decoupled_weight_decay"):
        return g + decay * parameter, parameter, _as_it_is
    kept = 1.0 - settings["lr"] * decay
    return (g, parameter, lambda new: new * kept) if after else (g, parameter * kept, _as_it_is)


def _as_it_is(new: Any) -> Any:
    return new


def _betas(settings: Any, wrong: str) -> tuple[Any, Any]:
    beta1, beta2 = settings["betas"]
    return (beta2, beta1) if wrong == "swapped-betas" else (beta1, beta2)


def moments(g: Any, state: Any, settings: Any, wrong: str) -> tuple[Any, Any, Any]:
    """First and second moment of this step, and its number; late moments go with late corrections."""
    beta1, beta2 = _betas(settings, wrong)
    m_old, v_old = state.get("exp_avg", 0.0 * g), state.get("exp_avg_sq", 0.0 * g)
    m = beta1 * m_old + (1.0 if wrong == "summed-first-moment" else 1.0 - beta1) * g
    apart = g - m if wrong == "centered-second-moment" else g
    v = beta2 * v_old + (1.0 if wrong == "summed-second-moment" else 1.0 - beta2) * apart.square()
    if wrong == "no-first-moment":
        m = g
    if wrong in ("state-one-step-late", "state-late", "first-moment-late"):
        m = m_old
    if wrong in ("state-one-step-late", "state-late", "second-moment-late"):
        v = v_old
    t = state.get("step", 0.0) + (0.0 if wrong == "state-one-step-late" else 1.0)
    return m, v, t


def _corrections(t: Any, settings: Any, wrong: str) -> tuple[Any, Any]:
    """The divisors that correct the bias of first and second moment."""
    beta1, beta2 = _betas(settings, wrong)
    if not t > 0 or wrong == "no-bias-correction" or settings.get("bias_correction") in (False, 0):
        return 1.0, 1.0
    first, second = 1.0 - beta1**t, 1.0 - beta2**t
    if wrong == "swapped-corrections":
        return second, first
    return (
        1.0 if wrong == "first-correction-missing" else first,
        1.0 if wrong == "second-correction-missing" else second,
    )


def _divisor(v: Any, second: Any, eps: Any, wrong: str) -> Any:
    if wrong == "eps-inside-root":
        return sqrt(v / second + eps)
    if wrong == "eps-before-correction":
        return (sqrt(v) + eps) / second**0.5
    return sqrt(v / second) + eps
