"""The table of formulas: how each known optimizer changes a parameter in a step.

A formula is a pure function `(parameter, gradient, state, settings) -> parameter after the step`. It is called with
plain tensors in float64 or with `Rounded` numbers. `state` and `settings` map torch's own names, those of
`optimizer.state[parameter]` and of `optimizer.param_groups[i]`, to tensors and numbers as they were before the step;
what the state does not have yet is missing. If a formula has mistakes, it takes the name of one as `wrong`.

The names of mistakes are part of the recording format (stage `variant[NAME]`); readers put them into words.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from traindiff.core.torch_compat.modes import with_torch_function
from traindiff.observe.common.user_formulas import FORMULAS as OF_USERS
from traindiff.observe.torch.replay import adafactor, adagrad, adam, muon, muon_parts, sgd
from traindiff.observe.torch.replay.rounded import SHORT, Rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """How an optimizer changes a parameter.

    Attributes:
        name: The class that defines it.
        after: The function.
        mistakes: Names that the function takes as `wrong`.
        needs_whole: True if an element depends on others, so that the formula needs all of the parameter.
        is_users: True if a user declared it.
        settings: Gives the settings of a group, if they are not all in the group.
        terms: Gives what adds up over ranks of an update that needs all of the parameter; None if nothing is known.
    """

    name: str
    after: Callable[..., Any]
    mistakes: tuple[str, ...] = ()
    needs_whole: bool = False
    is_users: bool = False
    settings: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] = lambda _, group: group
    terms: Callable[..., Tensor | None] | None = None

    def call(self, *arguments: Any, **wrong: str) -> Any:
        """The parameter after the step; a user's formula may use functions of torch, which hooks switch off."""
        with with_torch_function() if self.is_users else nullcontext():
            return self.after(*arguments, **wrong)


def _settings_of_adam(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    short = _in_float32(group) if settings_in_float32(group) else {}
    return {"decoupled_weight_decay": isinstance(optimizer, optim.AdamW), **group, **short}


def settings_in_float32(group: Mapping[str, Any]) -> bool:
    """True if an Adam of torch computes with the settings of this group in float32: fused, on a device."""
    return bool(group.get("fused")) and any(one.device.type != "cpu" for one in group["params"])


def _settings_of_deepspeed(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    short = _in_float32(group)
    return {**group, **short, "decoupled_weight_decay": bool(optimizer.adam_w_mode)}


def _in_float32(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an Adam that computes with them in float32.

    The fused kernels of DeepSpeed, and those of torch on CUDA devices (2.11, measured), are off in 1 - beta2 by a
    rounding of beta2: 1e-5 of it, for the usual 0.999.
    """
    return {name: _short(group[name]) for name in ("lr", "betas", "eps", "weight_decay")}


def _short(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_short(one) for one in value)
    return value if isinstance(value, Tensor) else Rounded(float(value), SHORT * abs(float(value)), unit=SHORT)


_FORMULAS = (
    Formula(name="SGD", after=sgd.sgd, mistakes=sgd.SGD_MISTAKES),
    Formula(name="ASGD", after=sgd.asgd, mistakes=sgd.ASGD_MISTAKES),
    Formula(name="Rprop", after=sgd.rprop, mistakes=sgd.RPROP_MISTAKES),
    Formula(name="Adagrad", after=adagrad.adagrad, mistakes=adagrad.ADAGRAD_MISTAKES),
    Formula(name="Adadelta", after=adagrad.adadelta, mistakes=adagrad.ADADELTA_MISTAKES),
    Formula(name="RMSprop", after=adagrad.rmsprop, mistakes=adagrad.RMSPROP_MISTAKES),
    Formula(name="Adam", after=adam.adam, mistakes=adam.ADAM_MISTAKES, settings=_settings_of_adam),
    Formula(name="AdamW", after=adam.adam, mistakes=adam.ADAM_MISTAKES, settings=_settings_of_adam),
    Formula(name="SparseAdam", after=adam.sparse_adam, mistakes=adam.SPARSE_ADAM_MISTAKES),
    Formula(name="Adamax", after=adam.adamax, mistakes=adam.ADAMAX_MISTAKES),
    Formula(name="NAdam", after=adam.nadam, mistakes=adam.NADAM_MISTAKES),
    Formula(name="RAdam", after=adam.radam, mistakes=adam.RADAM_MISTAKES),
    Formula(
        name="Adafactor", after=adafactor.adafactor, mistakes=adafactor.ADAFACTOR_MISTAKES, needs_whole=True,
        settings=adafactor.adafactor_settings,
    ),
    Formula(name="Muon", after=muon.muon, mistakes=muon.MUON_MISTAKES, needs_whole=True, terms=muon_parts.terms),
)  # fmt: skip

OF_TORCH: dict[type, Formula] = {
    getattr(optim, formula.name): formula for formula in _FORMULAS if hasattr(optim, formula.name)
}
"""The formulas of torch's optimizers; torch has had Adafactor since 2.5 and Muon since 2.9."""

OF_DEEPSPEED = {
    name: Formula(name=name, after=adam.adam, mistakes=adam.ADAM_MISTAKES, settings=_settings_of_deepspeed)
    for name in ("FusedAdam", "DeepSpeedCPUAdam")
}
"""The formulas of DeepSpeed's optimizers, by the names of their classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The formula of an optimizer.

    Attributes:
        formula: The formula.
        label: Its name; `NAME(AdamW)` for a class NAME that is AdamW or a subclass of it, and has a `step` of its own,
            which may compute something else on purpose.
    """

    formula: Formula
    label: str


def formula_of(optimizer: Optimizer) -> Known | None:
    """The formula of an optimizer: the user's, or the known one of the first of its base classes that has one."""
    for kind in type(optimizer).__mro__:
        if (given := OF_USERS.get(kind)) is not None:
            found = Formula(name=kind.__name__, after=given.after, needs_whole=given.needs_whole, is_users=True)
        elif kind in OF_TORCH:
            found = OF_TORCH[kind]
        elif kind.__module__.startswith("deepspeed.") and kind.__name__ in OF_DEEPSPEED:
            found = OF_DEEPSPEED[kind.__name__]
        else:
            continue
        own = has_own_step(type(optimizer), kind, of_user=found.is_users)
        return Known(formula=found, label=f"{type(optimizer).__name__}({found.name})" if own else found.name)
    return None


_MAKERS = frozenset({"torch", "deepspeed"})
"""Packages whose optimizers have formulas here."""

_METHODS = ("step", "_init_group")
"""Methods of optimizers that a subclass or a patch may replace to compute something else."""


def has_own_step(kind: type, known: type, *, of_user: bool = False) -> bool:
    """True if the steps of a class are not those of the class whose formula is known.

    That is so if it overrides a method, or if a method of either class is replaced or wrapped by other code.

    Args:
        kind: The class.
        known: It, or the base class of it that has the formula.
        of_user: The formula is a user's: code that is not torch's is what it describes.
    """
    methods = [(_functions(kind, name), _functions(known, name)) for name in _METHODS]
    return any(
        here != there or not (of_user or all(_package(one) in _MAKERS for one in there)) for here, there in methods
    )


def steps_by_itself(kind: type) -> bool:
    """True if the `step` of a class is neither torch's nor that of an engine: nothing is known of what it should do."""
    return not all(_package(one) in _MAKERS for one in _functions(kind, "step"))


def _functions(kind: type, name: str) -> list[Any]:
    """The function of a method, after those that wrap it, except torch's, which calls hooks."""
    wrappers: list[Any] = []
    method = getattr(kind, name, None)
    if method is None:
        return []
    function = inspect.unwrap(method, stop=wrappers.append)  # None: go on
    return [*(one for one in wrappers if _package(one) != "torch"), function]


def _package(function: Any) -> str:
    """The package whose code a function is. Its `__module__` may be copied from what it wraps."""
    return str(getattr(function, "__globals__", {}).get("__name__", "")).partition(".")[0]


def copied_settings(known: Known, optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """The current settings of a group; tensors are copied, not read: nothing synchronizes.

    Tensors of several elements are left out: they are memory that the optimizer keeps there, and no settings.
    """
    settings = known.formula.settings(optimizer, group)
    return {
        name: _copied(value)
        for name, value in settings.items()
        if name != "params" and not (isinstance(value, Tensor) and value.numel() != 1)
    }


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return tuple(_copied(one) for one in value) if type(value) in (tuple, list) else value


def as_numbers(values: Mapping[str, Any], read: Callable[[Tensor], float], *, short: bool) -> dict[str, Any]:
    """Settings or numbers of a state, for a formula.

    Args:
        values: Numbers, tensors with one element, tuples of them, and anything else, which is passed on.
        read: The number in a tensor.
        short: Whether the optimizer computes with its count of steps in float32 (capturable, differentiable, fused
            and compiled ones), and not in Python.
    """
    return {name: _as_number(name, value, read, short) for name, value in values.items()}


def _as_number(name: str, value: Any, read: Callable[[Tensor], float], short: bool) -> Any:  # noqa: FBT001
    if isinstance(value, tuple):
        return tuple(_as_number(name, one, read, short) for one in value)
    if name == "step":
        number = read(value) if isinstance(value, Tensor) else float(value)
        return Rounded(number, unit=SHORT) if short else number
    if isinstance(value, Tensor):
        unit = torch.finfo(value.dtype).eps / 2.0 if value.is_floating_point() else SHORT
        return Rounded(read(value), unit=unit)
    return value
