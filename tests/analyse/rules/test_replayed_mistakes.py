"""Each known mistake of each optimizer is found, and called what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import traindiff
from tests.analyse.rules.test_replay import findings
from tests.faulty_step import at_end_of_step
from tests.observe.hooks.trainings import batches
from traindiff.analyse.findings import Finding
from traindiff.analyse.rules.replayed_mistakes import MEANINGS, meaning
from traindiff.observe.torch.hooks import optimizer_replay
from traindiff.observe.torch.replay.copied_range import Start, plain
from traindiff.observe.torch.replay.formulas import OF_TORCH, as_numbers, copied_settings, formula_of
from traindiff.observe.torch.replay.mistakes import mistakes

DECAY = {"weight_decay": 0.1}

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.7, "dampening": 0.4, **DECAY}),
    "ASGD": (optim.ASGD, {"lr": 0.1, "lambd": 0.05, "alpha": 1.0, "t0": 1, **DECAY}),
    "Rprop": (optim.Rprop, {"lr": 0.01, "etas": (0.4, 1.3), "step_sizes": (0.005, 0.02)}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "eps": 1e-3, **DECAY}),
    "Adadelta": (optim.Adadelta, {"lr": 0.5, "rho": 0.7, "eps": 1e-3, **DECAY}),
    "RMSprop": (optim.RMSprop, {"lr": 0.05, "alpha": 0.8, "eps": 1e-3, "momentum": 0.7, "centered": True, **DECAY}),
    "RMSprop-plain": (optim.RMSprop, {"lr": 0.05, "alpha": 0.8, "eps": 1e-3, "momentum": 0.7, **DECAY}),
    "Adam": (optim.Adam, {"lr": 0.05, "betas": (0.7, 0.85), "eps": 1e-3, "amsgrad": True, **DECAY}),
    "AdamW": (optim.AdamW, {"lr": 0.05, "betas": (0.7, 0.85), "eps": 1e-3, **DECAY}),
    "Adamax": (optim.Adamax, {"lr": 0.05, "betas": (0.7, 0.85), "eps": 1e-3, **DECAY}),
    "NAdam": (
        optim.NAdam,
        {"lr": 0.05, "betas": (0.7, 0.85), "eps": 1e-3, "momentum_decay": 0.5, "decoupled_weight_decay": True, **DECAY},
    ),
    "RAdam": (optim.RAdam, {"lr": 0.05, "betas": (0.7, 0.85), "eps": 1e-3, "decoupled_weight_decay": True, **DECAY}),
    "Adafactor": (optim.Adafactor, {"lr": 2.0, "beta2_decay": -0.6, "d": 1.1, "eps": (1e-4, 0.1), **DECAY}),
    "Muon-adamw": (optim.Muon, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "momentum": 0.7, "lr": 0.1}),
    "Muon": (optim.Muon, {"lr": 0.1, "ns_steps": 7, "weight_decay": 0.5, "momentum": 0.7}),
}
"""Settings with which every mistake makes a difference, and none has a value that is usual."""


def model(kind: type[Optimizer]) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 12, bias=False))
    return made if OF_TORCH[kind].needs_whole else made[:1]  # one layer tells as much of formulas of elements


def held(of: nn.Module, kind: type[Optimizer]) -> list[nn.Parameter]:
    return [one for one in of.parameters() if kind is not optim.Muon or one.dim() == 2]


class MistakenStep:
    """Hooks that put the result of a mistaken step in place of the optimizer's own.

    Attributes:
        name: Of the mistake; nothing happens in steps where it is not one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._before: dict[int, Start] = {}
        self.name = ""
        optimizer.register_step_pre_hook(self._keep)
        at_end_of_step(optimizer, self._replace)

    def _keep(self, optimizer: Optimizer, *_: Any) -> None:
        known = formula_of(optimizer)
        assert known is not None
        for group in optimizer.param_groups:
            settings = plain(as_numbers(copied_settings(known, optimizer, group), float, short=False))
            for parameter in group["params"]:
                self._before[id(parameter)] = Start(
                    parameter=parameter.detach().double(), gradient=parameter.grad.double(),
                    state=_plain_state(optimizer.state.get(parameter, {})), settings=settings,
                )  # fmt: skip

    @torch.no_grad()
    def _replace(self, optimizer: Optimizer, *_: Any) -> None:
        known = formula_of(optimizer)
        assert known is not None
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                start = self._before[id(parameter)]
                mistake = next((one for one in mistakes(known.formula, start, {}) if one.name == self.name), None)
                with suppress(ZeroDivisionError):  # it makes no sense in the first step
                    if mistake is not None and (after := mistake.after(start)).isfinite().all():
                        parameter.copy_(after)


def _plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.double().clone() if isinstance(value, Tensor) and value.dim() else float(value)
        for name, value in state.items()
        if value is not None
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a step of a training begins with."""

    values: list[tuple[Tensor, Tensor]]
    """Each parameter and its gradient."""

    state: dict[str, Any]


STEPS = (0, 8)
"""The steps of a training in which each mistake is made."""


def moments(made: nn.Module, optimizer: Any) -> list[Moment]:
    """What these steps begin with, in a training without mistakes."""
    found, parameters = [], optimizer.param_groups[0]["params"]
    for number, batch in enumerate(batches(STEPS[-1] + 1)):
        (made(batch).square().mean() * 2.0 ** (number % 3)).backward()
        if number in STEPS:
            values = [(one.detach().clone(), one.grad.clone()) for one in parameters]
            found.append(Moment(values=values, state=deepcopy(optimizer.state_dict())))
        optimizer.step()
        optimizer.zero_grad()
    return found


def restore(optimizer: Any, moment: Moment) -> None:
    """Begin a step as it began there."""
    optimizer.state.clear()
    optimizer.load_state_dict(deepcopy(moment.state))
    with torch.no_grad():
        for parameter, (value, gradient) in zip(optimizer.param_groups[0]["params"], moment.values, strict=True):
            parameter.copy_(value)
            parameter.grad = gradient.clone()


def train(path: Path, which: str) -> dict[str, list[Finding]]:
    """The findings about a training that makes all mistakes of an optimizer, each in steps of its own, by mistake."""
    kind, options = OPTIMIZERS[which]
    made = model(kind)
    optimizer: Any = kind(held(made, kind), **options)
    beginnings = moments(made, optimizer)
    mistaken = MistakenStep(optimizer)
    names = [case for of, case in CASES if of == which for _ in beginnings]
    with (
        patch.object(optimizer_replay, "FIRST", len(names)),
        traindiff.record(path, made, optimizer, observe=("replay", "param"), strict=True),
    ):
        for mistaken.name, moment in zip(names, beginnings * len(names), strict=False):
            restore(optimizer, moment)
            optimizer.step()
    found: dict[str, list[Finding]] = {one: [] for one in names}
    for one in findings(path):
        if one.kind != "edited":  # by `restore`
            found[names[one.step]].append(one)
    return found


@pytest.fixture(scope="module")
def found_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, list[Finding]]]:
    """The findings about a training that makes all mistakes of an optimizer, by mistake."""
    return cache(lambda which: train(tmp_path_factory.mktemp("mistakes") / which, which))


NOT_HERE = {
    ("Rprop", "no-decay"), ("Rprop", "sign-of-gradient"),  # it has no decay, and uses nothing but the sign
    ("Adam", "decay-after-step"), ("RMSprop", "centered"), ("RMSprop", "state-late"),
    ("RMSprop-plain", "not-centered"), ("RMSprop-plain", "centered-late"),
    ("Muon", "lr-adjusted-as-original"), ("Muon-adamw", "lr-adjusted-to-adamw"),
    ("Muon-adamw", "lr-adjusted-for-transpose"), ("Muon-adamw", "no-decay"),
}  # fmt: skip
"""Mistakes that make no difference with these settings."""

SAME = {
    ("SGD", "state-reset"): {"no-momentum"},
    ("ASGD", "state-reset"): {"eta-not-used"},
    ("Rprop", "no-gradient"): {"never-updated"},
    ("RAdam", "first-correction-missing"): {"no-bias-correction"},  # in its first steps it has no other correction
    ("RAdam", "first-moment-late"): {"state-late"},
    ("RAdam", "state-late"): {"first-moment-late"},
    ("Muon", "state-late"): {"other-nesterov"},  # what Nesterov momentum adds is this step's gradient
    ("Muon", "state-reset"): {"no-momentum"},
    ("Muon-adamw", "state-reset"): {"no-momentum"},
    ("Muon-adamw", "no-gradient"): {"state-late"},  # the momentum's size makes no difference
}
"""Mistakes that do the same with these settings, at least in some steps."""

OF_ALL = ("no-decay", "other-sign", "state-reset", "no-gradient", "sign-of-gradient")

CASES = [
    (which, name)
    for which, (kind, _) in OPTIMIZERS.items()
    for name in (*OF_TORCH[kind].mistakes, *OF_ALL)
    if (which, name) not in NOT_HERE
]


@pytest.mark.parametrize(("which", "name"), CASES)
def test_a_mistake_is_found_and_named(
    which: str, name: str, found_in: Callable[[str], dict[str, list[Finding]]]
) -> None:
    found = found_in(which)[name]

    assert {one.kind for one in found} <= {"update-rule", "never-updated"}
    names = [{str(one.evidence.get("variant", one.kind)), *one.evidence.get("or_variants", ())} for one in found]
    same = {name, *SAME.get((which, name), set())}
    assert any(same & some for some in names), names
    # Where a mistake makes as little difference as rounding, its name may be missing; but there is no other name.
    same |= {"update-rule", "never-updated"}
    assert all(same & some for some in names), names
    for one in found:
        if "variant" in one.evidence and one.evidence["variant"] in MEANINGS:
            assert f" {MEANINGS[one.evidence['variant']]}. " in one.message
            assert ("This step does not tell it from: " in one.message) == ("or_variants" in one.evidence)


def test_every_mistake_has_words() -> None:
    names = {name for formula in OF_TORCH.values() for name in formula.mistakes}

    assert names - set(MEANINGS) == set()
    assert meaning("beta2=0.9") == "as if beta2 were 0.9"
    assert meaning("lr=0.1 (of the step before)") == "as if lr were 0.1, as in the step before"
    assert meaning("gradient x 2") == "as if the gradient were 2 x what it is"
    assert meaning("settings of groups[1]") == "with the settings of groups[1]"


@pytest.mark.parametrize("module", ["sgd", "adam", "adagrad", "adafactor", "muon"])
def test_each_family_has_at_least_twenty_mistakes(module: str) -> None:
    names = set()
    for kind, formula in OF_TORCH.items():
        if formula.after.__module__.endswith(f".{module}"):
            optimizer: Any = kind([nn.Parameter(torch.ones(2, 2))])
            settings = plain(as_numbers(copied_settings(formula_of(optimizer), optimizer, optimizer.param_groups[0]),
                                        float, short=False))  # fmt: skip
            start = Start(
                parameter=torch.ones(2, 2), gradient=torch.ones(2, 2), state={"step": 1.0},
                settings={**settings, **({"weight_decay": 0.3} if "weight_decay" in settings else {})},
            )  # fmt: skip
            names |= {one.name.partition("=")[0] for one in mistakes(formula, start, {"the step before": {"lr": 9.0}})}

    assert len(names) >= 20, names
