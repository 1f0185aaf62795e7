"""Parameters that stop moving in the middle of a run are found; those that are meant to rest are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Rprop

import traindiff
from tests.analyse.rules.small_trainings import classifier, found, kinds, points, train


def stuck(kind: Any, after: int) -> Any:
    """An optimizer whose step does nothing more after so many calls, like a compiled step that was kept."""

    class Stuck(kind):  # type: ignore[misc]
        calls = 0

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            self.calls += 1
            return super().step(closure) if self.calls <= after else None

    return Stuck


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_an_optimizer_that_does_nothing_from_a_step_on_is_found(kind: Any, tmp_path: Path) -> None:
    model = classifier()

    verdict = traindiff.check(train(tmp_path / "run", model, stuck(kind, 6)(model.parameters(), lr=0.01), steps=14))

    finding = found(verdict, "stopped")
    assert verdict.verdict == "unhealthy"
    assert (finding.step, finding.phase) == (6, "param")
    assert "last moved in step 5, and then stands still: 8 steps" in finding.message
    assert ("count of its steps stays at 6" in finding.message) == (kind is not SGD)


class Forgetful(Adam):
    """Adam that leaves out one parameter from its sixth call on."""

    def __init__(self, parameters: Any, *, forgets: Tensor) -> None:
        super().__init__(parameters, lr=0.01)
        self.forgets, self.calls = forgets, 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.calls += 1
        kept = self.forgets.grad
        if self.calls > 5:
            self.forgets.grad = None
        super().step(closure)
        self.forgets.grad = kept


def test_one_parameter_that_an_optimizer_forgets_is_found_alone(tmp_path: Path) -> None:
    model = classifier()
    optimizer = Forgetful(model.parameters(), forgets=model[2].weight)

    verdict = traindiff.check(train(tmp_path / "run", model, optimizer, steps=14))

    assert [(one.kind, one.path) for one in verdict.findings if one.kind == "stopped"] == [("stopped", "2.weight")]


def freeze(model: nn.Sequential, _: torch.optim.Optimizer, step: int) -> None:
    if step >= 6:
        model[0].requires_grad_(False)


def decay_to_zero(_: nn.Sequential, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.01 if step < 6 else 0.0


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize("change", [freeze, decay_to_zero])
def test_a_layer_that_is_frozen_or_has_a_rate_of_zero_may_rest(change: Any, kind: Any, tmp_path: Path) -> None:
    model = classifier()
    optimizer = kind(model.parameters(), lr=0.01)
    path = train(tmp_path / "run", model, optimizer, steps=16, before_step=lambda step: change(model, optimizer, step))

    assert "stopped" not in kinds(traindiff.check(path))


class EveryFourth(SGD):
    """Adds up the gradients of four calls."""

    calls = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for one in group["params"]:
                total = self.state[one].setdefault("total", torch.zeros_like(one))
                if one.grad is not None:
                    total += one.grad
                if self.calls % 4 == 0:
                    one.data.sub_(total, alpha=group["lr"])
                    total.zero_()


class EveryFourthWithoutState(EveryFourth):
    """The same, with its sums out of sight."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.totals: dict[int, Tensor] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for one in group["params"]:
                total = self.totals.setdefault(id(one), torch.zeros_like(one))
                if one.grad is not None:
                    total += one.grad
                if self.calls % 4 == 0:
                    one.data.sub_(total, alpha=group["lr"])
                    total.zero_()


@pytest.mark.parametrize("kind", [EveryFourth, EveryFourthWithoutState])
@pytest.mark.parametrize("steps", [15, 19])
def test_optimizers_that_add_up_several_calls_rest_between_them(kind: Any, steps: int, tmp_path: Path) -> None:
    model = classifier()
    path = train(tmp_path / "run", model, kind(model.parameters(), lr=0.01), steps=steps)

    assert "stopped" not in kinds(traindiff.check(path))


def test_optimizers_that_settle_by_themselves_are_not_judged(tmp_path: Path) -> None:
    model = classifier()
    optimizer = Rprop(model.parameters(), lr=1e-9, step_sizes=(1e-9, 1e-9))

    assert "stopped" not in kinds(traindiff.check(train(tmp_path / "run", model, optimizer, steps=12)))


def test_a_search_that_has_converged_is_not_judged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(20, 4)
    optimizer = LBFGS(model.parameters(), tolerance_grad=1e-2)
    inputs, labels = points(0)
    with traindiff.record(tmp_path / "run", model, optimizer) as run:
        for _ in range(12):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), labels) + 0.1 * model.weight.square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            run.log("step", 1.0)

    assert "stopped" not in kinds(traindiff.check(tmp_path / "run"))


def test_a_scaler_that_skips_steps_stops_nothing(tmp_path: Path) -> None:
    model = classifier()
    optimizer = Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)

    def overflow(step: int) -> None:
        if step >= 5:
            model[0].weight.grad[0, 0] = torch.inf

    path = train(tmp_path / "run", model, optimizer, steps=14, scaler=scaler, after_backward=overflow)

    assert "stopped" not in kinds(traindiff.check(path))


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_updates_that_bfloat16_rounds_away_are_the_matter_of_another_rule(kind: Any, tmp_path: Path) -> None:
    model = classifier().bfloat16()
    optimizer = kind(model.parameters(), lr=1e-2)

    def before_step(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 if step < 4 else 1e-7

    path = train(
        tmp_path / "run", model, optimizer, steps=14, before_step=before_step,
        batches=lambda step: (points(step)[0].bfloat16(), points(step)[1]),
    )  # fmt: skip

    assert "stopped" not in kinds(traindiff.check(path))
