"""Known mistakes of optimizers: variations of a formula that may explain an update which the formula does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from traindiff.observe.torch.replay.copied_range import Start
from traindiff.observe.torch.replay.formulas import Formula

SETTINGS: Mapping[str, tuple[float, ...]] = {
    "betas[0]": (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99),
    "betas[1]": (0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999),
    "eps": (0.0, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10, 1e-12),
    "momentum": (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99),
    "dampening": (0.0,),
    "weight_decay": (0.01, 0.1, 1e-4, 5e-4),
    "alpha": (0.75, 0.9, 0.95, 0.99, 0.999),
    "rho": (0.9, 0.95, 0.99, 0.999),
    "lr_decay": (0.0,),
    "lambd": (0.0, 1e-4),
    "momentum_decay": (0.0, 4e-3),
    "beta2_decay": (-0.8, -0.5, -1.0),
    "d": (1.0,),
    "etas[0]": (0.5, 0.9),
    "etas[1]": (1.1, 1.2, 2.0),
    "ns_steps": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0),
}
"""Values of settings that implementations have by default or hard-coded."""

NAMES = {"betas[0]": "beta1", "betas[1]": "beta2", "etas[0]": "etaminus", "etas[1]": "etaplus"}
"""Names of entries of settings that are tuples."""

GRADIENT_FACTORS = (2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 16.0, 0.0625)
"""Factors by which gradients are wrong if they are summed or averaged over ranks or micro-steps by mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A mistake.

    Attributes:
        name: In the recording: `NAME`, or `SETTING=VALUE`, or `SETTING=VALUE (of WHERE)`.
        after: The parameter after a step with this mistake.
    """

    name: str
    after: Callable[[Start], Any]


def mistakes(formula: Formula, start: Start, others: Mapping[str, Mapping[str, Any]]) -> Iterator[Mistake]:
    """Yield each known mistake that could change the result of this step; the likelier ones first.

    Args:
        formula: The formula.
        start: Its arguments, as plain numbers and tensors.
        others: By where they come from, the settings that a mistaken optimizer may use instead, as plain numbers.
    """
    for name in formula.mistakes:
        yield Mistake(name=name, after=partial(_after, formula, wrong=name))
    yield from _of_decay(formula, start)
    for where, settings in others.items():
        yield from _of_other_settings(formula, start.settings, settings, where)
    yield from _of_inputs(formula, start)
    for setting, values in SETTINGS.items():
        more = (float(start.settings.get("momentum", 0.0)),) if setting == "dampening" else ()
        for value in (*more, *values):
            yield from _with_setting(formula, start.settings, setting, value)
    for factor in GRADIENT_FACTORS:
        yield Mistake(name=f"gradient x {factor:g}", after=_of_gradient(formula, partial(torch.mul, other=factor)))


def _after(formula: Formula, start: Start, **wrong: str) -> Any:
    return formula.call(start.parameter, start.gradient, start.state, start.settings, **wrong)


def _of_gradient(formula: Formula, change: Callable[[Any], Any]) -> Callable[[Start], Any]:
    return lambda start: _after(formula, replace(start, gradient=change(start.gradient)))


def _of_settings(formula: Formula, **settings: Any) -> Callable[[Start], Any]:
    return lambda start: _after(formula, replace(start, settings={**start.settings, **settings}))


def _of_state(formula: Formula, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Callable[[Start], Any]:
    return lambda start: _after(formula, replace(start, state=change(start.state)))


def _of_decay(formula: Formula, start: Start) -> Iterator[Mistake]:
    decay, lr = start.settings.get("weight_decay", 0.0), start.settings.get("lr", 0.0)
    if not decay:
        return
    without = _of_settings(formula, weight_decay=0.0)
    yield Mistake(name="no-decay", after=without)
    if not is_decoupled(formula, start):
        yield Mistake(name="decoupled-decay", after=lambda given: without(given) - lr * decay * given.parameter)
    else:
        sign = -1.0 if start.settings.get("maximize") else 1.0
        yield Mistake(
            name="coupled-decay",
            after=lambda given: without(
                replace(given, gradient=given.gradient + sign * decay * given.parameter)
            ),
        )  # fmt: skip
        if lr:
            yield Mistake(name="decay-without-lr", after=_of_settings(formula, weight_decay=decay / lr))
    yield Mistake(name="decay-twice", after=_of_settings(formula, weight_decay=2.0 * decay))
    yield Mistake(name="decay-negative", after=_of_settings(formula, weight_decay=-decay))


def is_decoupled(formula: Formula, start: Start) -> bool:
    """True if weight decay shrinks the parameter itself and is not added to the gradient."""
    if "decoupled_weight_decay" in start.settings:
        return bool(start.settings["decoupled_weight_decay"])
    return formula.name in ("Muon", "Adafactor")


def _of_other_settings(
    formula: Formula, settings: Mapping[str, Any], others: Mapping[str, Any], where: str
) -> Iterator[Mistake]:
    """The step with one setting of elsewhere, and with all of them."""
    own, numbers = _numbers(settings), _numbers(others)
    different = [name for name, value in numbers.items() if _differs(own.get(name), value)]
    for name in different:
        for mistake in _with_setting(formula, settings, name, numbers[name]):
            yield Mistake(name=f"{mistake.name} (of {where})", after=mistake.after)
    if len(different) > 1:
        yield Mistake(name=f"settings of {where}", after=_of_settings(formula, **others))


def _of_inputs(formula: Formula, start: Start) -> Iterator[Mistake]:
    yield Mistake(name="other-sign", after=_of_gradient(formula, torch.neg))
    if start.state:
        kept = {name: value for name, value in start.state.items() if name == "touched"}
        yield Mistake(name="state-reset", after=_of_state(formula, lambda _: kept))
    if "step" in start.state:
        count = float(start.state["step"])
        for name, step in (
            ("step-one-behind", count - 1.0),
            ("step-one-ahead", count + 1.0),
            ("step-not-counted", 0.0),
        ):
            yield Mistake(name=name, after=_of_state(formula, partial(_with_step, step)))
    yield Mistake(name="no-gradient", after=_of_gradient(formula, torch.zeros_like))
    yield Mistake(name="sign-of-gradient", after=_of_gradient(formula, torch.sign))
    if start.settings.get("amsgrad"):
        yield Mistake(name="no-amsgrad", after=_of_settings(formula, amsgrad=False))


def _with_step(step: float, state: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**state, "step": step}


def _with_setting(formula: Formula, settings: Mapping[str, Any], setting: str, value: float) -> Iterator[Mistake]:
    name, _, index = setting.removesuffix("]").partition("[")
    if not _differs(_numbers(settings).get(setting), value):
        return
    given = settings[name]
    number = int(value) if isinstance(given, int) and value.is_integer() else value
    changed = number if not index else tuple(value if str(i) == index else one for i, one in enumerate(given))
    yield Mistake(name=f"{NAMES.get(setting, setting)}={value:g}", after=_of_settings(formula, **{name: changed}))


def _numbers(settings: Mapping[str, Any]) -> dict[str, float]:
    """The settings that are numbers, and the numbers in tuples as `NAME[I]`."""
    entries = {name: value for name, value in settings.items() if not isinstance(value, tuple)}
    for name, value in settings.items():
        if isinstance(value, tuple):
            entries.update((f"{name}[{index}]", one) for index, one in enumerate(value))
    return {
        name: float(one) for name, one in entries.items() if isinstance(one, (int, float)) and not isinstance(one, bool)
    }


def _differs(setting: float | None, other: float) -> bool:
    return setting is not None and abs(setting - other) > 1e-6 * max(abs(other), 1e-12)
