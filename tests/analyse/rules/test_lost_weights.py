"""Steps that throw away what the weights held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import traindiff
from tests.analyse.rules.small_trainings import classifier, found, kinds, points, train

Make = Callable[[nn.Module], Optimizer]


@pytest.mark.parametrize(
    "make",
    [
        lambda model: AdamW(model.parameters(), lr=20.0),
        lambda model: Adam(model.parameters(), lr=3.0),
        lambda model: SGD(model.parameters(), lr=500.0),
    ],
)
def test_a_first_step_that_is_far_too_large_is_named(make: Make, tmp_path: Path) -> None:
    model = classifier()
    checked = traindiff.check(train(tmp_path / "run", model, make(model), steps=4))

    finding = found(checked, "lost-weights")
    assert checked.verdict == "unhealthy"
    assert (finding.step, finding.phase) == (0, "update")
    assert finding.evidence["ratio"] > 3.0
    assert finding.evidence["value"] > 10.0 * finding.evidence["before"]
    assert "what the weights held is lost" in finding.message


def test_a_later_step_is_named_with_its_learning_rate(tmp_path: Path) -> None:
    model = classifier()
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def slip(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 30.0 if step == 6 else 1e-3

    checked = traindiff.check(train(tmp_path / "run", model, optimizer, steps=9, before_step=slip))

    assert found(checked, "lost-weights").step == 6
    assert "(learning rate 30)" in found(checked, "lost-weights").message


@pytest.mark.parametrize("scale", [0.0, 1e-6])
def test_weights_that_begin_near_zero_may_leap(scale: float, tmp_path: Path) -> None:
    model = classifier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    checked = traindiff.check(train(tmp_path / "run", model, Adam(model.parameters(), lr=0.01), steps=6))

    assert "lost-weights" not in kinds(checked)


def test_a_large_loss_without_a_leap_is_no_lost_weight(tmp_path: Path) -> None:
    model = classifier()

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = points(step)
        return inputs * (1e4 if step == 3 else 1.0), labels

    checked = traindiff.check(
        train(tmp_path / "run", model, SGD(model.parameters(), lr=1e-9), steps=6, batches=batches)
    )

    assert "lost-weights" not in kinds(checked)
