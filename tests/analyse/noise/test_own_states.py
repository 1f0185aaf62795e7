"""Optimizers of one's own that average quotients: what rounding does to them is no divergence, and faults are found."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import traindiff

Baseline = Callable[..., Path]

WRONG = 3
"""The step that is wrong."""


class Own(torch.optim.Optimizer):
    """Adam's moments, with a fault in one step, or in one parameter in that step."""

    def __init__(self, parameters: Any, fault: str = "") -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.fault, self.steps = fault, 0
        self.betas = (0.95 if fault == "beta" else 0.9, 0.99)
        self.eps = 1e-4 if fault == "eps" else 1e-8

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        wrong = self.fault if self.steps == WRONG else ""
        self.steps += 2 if wrong == "counter" else 1
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            state, gradient = self.state[parameter], parameter.grad
            if not state:
                state.update({name: torch.zeros_like(parameter) for name in self.names})
            if number == 2:
                change, _, name = wrong.partition(" ")
                if name:
                    state[name].mul_({"lost": 0.0, "scaled": 1.05}[change])
                gradient = gradient * 1.02 if wrong == "gradient" else gradient
            state["exp_avg_sq"].mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
            self.move(parameter, gradient, state)

    names: tuple[str, ...] = ()

    def move(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def correction(self, beta: float) -> float:
        return 1.0 if self.fault == "correction" else 1 - beta**self.steps


class LaProp(Own):
    """Averages quotients."""

    names = ("exp_avg", "exp_avg_sq")

    def move(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        divisor = state["exp_avg_sq"].sqrt().add_(self.eps) / math.sqrt(self.correction(self.betas[1]))
        state["exp_avg"].mul_(self.betas[0]).addcdiv_(gradient, divisor, value=1 - self.betas[0])
        parameter.add_(state["exp_avg"], alpha=-0.01 / self.correction(self.betas[0]))


class AdaMod(Own):
    """Averages learning rates."""

    names = ("exp_avg", "exp_avg_sq", "exp_avg_lr")

    def move(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        state["exp_avg"].lerp_(gradient, 1 - self.betas[0])
        rate = 0.01 * math.sqrt(self.correction(self.betas[1])) / state["exp_avg_sq"].sqrt().add_(self.eps)
        state["exp_avg_lr"].lerp_(rate, 0.01)
        parameter.sub_(torch.minimum(rate, state["exp_avg_lr"]) * state["exp_avg"])


def trained(
    path: Path, optimizer: type[Own], *, seed: int = 0, parts: int = 1, before: int = 0, fault: str = ""
) -> Path:
    """Records six steps, after some that are not recorded."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    own = optimizer(model.parameters(), fault)
    data = torch.Generator().manual_seed(seed)

    def train(steps: int, parts: int) -> None:
        for _ in range(steps):
            for part in torch.randn(64, 10, generator=data).split(64 // parts):
                (cross_entropy(model(part), part[:, :4].argmax(-1)) / parts).backward()
            own.step()
            own.zero_grad()

    train(before, 1)
    with traindiff.record(path / "run", model, own):
        train(6, parts)
    return path / "run"


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Trains a baseline when it is first asked for."""
    return cache(lambda *args, **kwargs: trained(tmp_path_factory.mktemp("baseline"), *args, **kwargs))


@pytest.mark.parametrize("optimizer", [LaProp, AdaMod])
@pytest.mark.parametrize("before", [0, WRONG], ids=["begun", "continued"])
@pytest.mark.parametrize("seed", [0, 4])
def test_states_that_average_quotients_may_differ_where_a_gradient_is_almost_zero(
    optimizer: type[Own], before: int, seed: int, baselines: Baseline, tmp_path: Path
) -> None:
    baseline = baselines(optimizer, seed=seed, before=before)
    found = traindiff.compare(baseline, trained(tmp_path, optimizer, seed=seed, before=before, parts=8))

    assert found.verdict == "equivalent", str(found)


OF_STATES = {
    LaProp: ("lost exp_avg", "lost exp_avg_sq", "scaled exp_avg", "scaled exp_avg_sq"),
    AdaMod: ("lost exp_avg", "lost exp_avg_sq", "lost exp_avg_lr", "scaled exp_avg_sq", "scaled exp_avg_lr"),
}


@pytest.mark.parametrize(
    ("optimizer", "fault"), [(own, fault) for own in OF_STATES for fault in (*OF_STATES[own], "gradient", "counter")]
)
@pytest.mark.parametrize(("before", "parts"), [(0, 1), (0, 8), (WRONG, 8)], ids=["same", "begun", "continued"])
def test_a_fault_in_one_step_of_such_an_optimizer_is_found_there(
    optimizer: type[Own], fault: str, before: int, parts: int, baselines: Baseline, tmp_path: Path
) -> None:
    candidate = trained(tmp_path, optimizer, before=before, parts=parts, fault=fault)
    first = traindiff.compare(baselines(optimizer, seed=0, before=before), candidate).first_divergence

    assert first is not None
    assert (first.step, first.phase) == (WRONG - before, "optimizer")
    assert first.path == "2.weight" or fault == "counter"


@pytest.mark.parametrize("optimizer", [LaProp, AdaMod])
@pytest.mark.parametrize("fault", ["beta", "eps", "correction"])
@pytest.mark.parametrize("parts", [1, 8])
def test_a_fault_in_all_steps_of_such_an_optimizer_is_found_at_once(
    optimizer: type[Own], fault: str, parts: int, baselines: Baseline, tmp_path: Path
) -> None:
    candidate = trained(tmp_path, optimizer, parts=parts, fault=fault)
    first = traindiff.compare(baselines(optimizer, seed=0, before=0), candidate).first_divergence

    assert first is not None
    assert (first.step, first.phase) == (0, "optimizer")
