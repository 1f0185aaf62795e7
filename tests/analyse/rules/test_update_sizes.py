"""Updates that are too large or too small, and learning rates that do not do what a schedule is for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import traindiff
from tests.analyse.rules.small_trainings import classifier, found, kinds, points, train


def test_updates_that_replace_a_weight_are_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 4))
    optimizer = SGD(model.parameters(), lr=0.1)

    def grow(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 10.0 * 3.0**step

    verdict = traindiff.check(train(tmp_path / "run", model, optimizer, steps=14, before_step=grow))

    finding = found(verdict, "large-updates")
    assert verdict.verdict == "unhealthy"
    assert (finding.phase, finding.path) == ("update", "0.weight")
    assert finding.evidence["ratio"] > 0.5
    assert finding.evidence["num_steps"] >= 10
    assert "lower the learning rate" in finding.message


def test_updates_that_change_nothing_are_a_warning(tmp_path: Path) -> None:
    model = classifier()
    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=1e-7), steps=24)

    verdict = traindiff.check(run)
    finding = found(verdict, "small-updates")
    assert verdict.verdict == "healthy"
    assert (finding.step, finding.phase) == (0, "update")
    assert finding.evidence["ratio"] < 1e-7
    assert finding.evidence["num_steps"] == 24


def test_weights_that_have_gradients_and_do_not_move_at_all_are_a_warning(tmp_path: Path) -> None:
    model = classifier().to(torch.bfloat16)
    optimizer = SGD(model.parameters(), lr=1e-6)

    def batches(step: int) -> tuple[Tensor, Tensor]:
        x, labels = points(step)
        return x.to(torch.bfloat16), labels

    finding = found(
        traindiff.check(train(tmp_path / "run", model, optimizer, steps=24, batches=batches)), "small-updates"
    )
    assert "Steps move half of all weights not at all, although they have gradients, in 24 steps" in finding.message
    assert "bfloat16 rounds their updates away" in finding.message


def test_a_learning_rate_that_moves_nothing_is_a_warning(tmp_path: Path) -> None:
    model = classifier()
    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=1e-12), steps=24)

    finding = found(traindiff.check(run), "small-updates")
    assert finding.evidence["ratio"] == 0.0
    assert "float32 rounds their updates away" in finding.message


def test_the_dtype_is_that_of_weights_that_do_not_move(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(20, 16), *[nn.Linear(16, 16).bfloat16() for _ in range(2)])
    optimizer = SGD(model.parameters(), lr=1e-6)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for _ in range(24):
            optimizer.zero_grad()
            model[1:](model[0](torch.randn(8, 20)).bfloat16()).float().square().mean().backward()
            optimizer.step()

    assert "bfloat16 rounds their updates away" in found(traindiff.check(tmp_path / "run"), "small-updates").message


def test_frozen_weights_in_an_optimizer_and_groups_that_rest_are_no_small_updates(tmp_path: Path) -> None:
    model = classifier()
    model[0].requires_grad_(False)
    groups = [{"params": list(model[:3].parameters()), "lr": 0.0}, {"params": list(model[4].parameters())}]
    run = train(tmp_path / "run", model, SGD(groups, lr=0.1), steps=24)
    assert "small-updates" not in kinds(traindiff.check(run))


def test_an_optimizer_that_has_converged_and_rests_is_no_small_updates(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(20, 4)
    optimizer = LBFGS(model.parameters(), lr=0.5)
    inputs, labels = points(0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels) + 0.1 * model.weight.square().sum()
        loss.backward()
        return loss

    with traindiff.record(tmp_path / "run", model, optimizer):
        for _ in range(40):
            optimizer.step(closure)
    assert kinds(traindiff.check(tmp_path / "run")) == {"repeated-batch"}


def test_an_optimizer_that_steps_without_a_gradient_is_found(tmp_path: Path) -> None:
    model = classifier()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with traindiff.record(tmp_path / "run", model, optimizer):
        for step in range(12):
            x, labels = points(step)
            functional.cross_entropy(model(x), labels).backward()
            optimizer.zero_grad()
            optimizer.step()

    verdict = traindiff.check(tmp_path / "run")
    finding = found(verdict, "idle-optimizer")
    assert verdict.verdict == "unhealthy"
    assert finding.evidence == {"num_steps": 12, "num_parameters": 6, "frozen": False}
    assert "Look for zero_grad() between backward() and step()" in finding.message


def test_learning_rates_that_stay_0_are_found(tmp_path: Path) -> None:
    model = classifier()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    schedule = LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / 5))
    verdict = traindiff.check(
        train(tmp_path / "run", model, optimizer, steps=16, after_step=lambda step: schedule.step())
    )

    (finding,) = verdict.findings
    assert (finding.kind, finding.step, finding.path, finding.slot) == (
        "zero-learning-rate", 5, "optimizer.groups[0]", "lr",
    )  # fmt: skip
    assert finding.evidence["num_steps"] == 11
    assert "0 in 11 steps in a row, from step 5 on" in finding.message


@pytest.mark.parametrize("rates", [{0: 0.0, 1: 0.1}, {0: 0.1, 1: 0.0}])
def test_one_group_may_rest_at_a_learning_rate_of_0(rates: Mapping[int, float], tmp_path: Path) -> None:
    model = classifier()
    groups = [{"params": list(model[0].parameters())}, {"params": [*model[2].parameters(), *model[4].parameters()]}]
    optimizer = SGD(groups, lr=0.1)
    for number, rate in rates.items():
        optimizer.param_groups[number]["lr"] = rate

    assert kinds(traindiff.check(train(tmp_path / "run", model, optimizer, steps=12))) == set()


def test_a_schedule_that_nothing_steps_is_a_warning(tmp_path: Path) -> None:
    model = classifier()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    LambdaLR(optimizer, lambda step: 0.99**step)
    run = train(tmp_path / "run", model, optimizer, steps=30)

    verdict = traindiff.check(run, config={"unchanged-learning-rate": {"least_steps": 30}})

    (warning,) = verdict.warnings
    assert (warning.kind, warning.step, warning.path) == ("unchanged-learning-rate", 0, "optimizer.groups[0]")
    assert warning.evidence == {"learning_rate": 1e-3, "num_steps": 30}
    assert traindiff.check(run).warnings == ()  # a run of 30 steps may be within the first epoch


def test_a_schedule_that_is_followed_is_none(tmp_path: Path) -> None:
    model = classifier()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    schedule = LambdaLR(optimizer, lambda step: 0.99**step)
    run = train(tmp_path / "run", model, optimizer, steps=8, after_step=lambda step: schedule.step())

    assert kinds(traindiff.check(run, config={"unchanged-learning-rate": {"least_steps": 8}})) == set()
