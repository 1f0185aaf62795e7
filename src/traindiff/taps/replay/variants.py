"""Mistakes that optimizers are known to make, as other settings of the same formula.

Their names are part of the recording format (stage `variant[NAME]`); what they mean in words is up to
whoever reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from traindiff.taps.replay.formulas import Adam, Number, Rule, Sgd

BETAS1 = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
BETAS2 = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)
EPSILONS = (1e-5, 1e-6, 1e-7, 1e-8, 1e-10, 1e-12)
MOMENTA = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99)


def variants(rule: Rule) -> Iterator[tuple[str, Rule]]:
    """Each mistake that would change what this rule does, with its name; the likelier ones first."""
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
    for beta in BETAS1:
        if _differs(rule.beta1, beta):
            yield f"beta1={beta:g}", replace(rule, beta1=beta)
    for beta in BETAS2:
        if _differs(rule.beta2, beta):
            yield f"beta2={beta:g}", replace(rule, beta2=beta)
    for eps in EPSILONS:
        if _differs(rule.eps, eps):
            yield f"eps={eps:g}", replace(rule, eps=eps)
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
    for momentum in MOMENTA:
        if _differs(rule.momentum, momentum):
            yield f"momentum={momentum:g}", replace(rule, momentum=momentum)


def _differs(setting: Number, other: float) -> bool:
    return bool(abs(float(setting) - other) > 1e-6 * max(abs(other), 1e-12))
