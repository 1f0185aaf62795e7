"""Losses that spike, diverge or stall, and what moved first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import traindiff
from tests.analyse.rules.small_trainings import classifier, found, kinds, points, train


def test_a_batch_that_makes_the_loss_spike_is_what_moved_first(tmp_path: Path) -> None:
    model = classifier()

    def batches(step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = points(step)
        return (30.0 * inputs.roll(1, 0) if step == 25 else inputs), labels

    verdict = traindiff.check(
        train(tmp_path / "run", model, SGD(model.parameters(), lr=0.05), steps=28, batches=batches)
    )

    finding = found(verdict, "loss-spike")
    assert verdict.verdict == "healthy"
    assert (finding.step, finding.phase, finding.path) == (25, "loss", "loss")
    assert finding.evidence["value"] > 2.0 * finding.evidence["median"]
    assert finding.evidence["moved_first"] == "batch (root) input[0]"
    assert 25.0 < finding.evidence["moved_factor"] < 35.0
    assert found(verdict, "gradient-spike").step == 25


def test_an_update_that_makes_the_loss_spike_is_what_moved_first(tmp_path: Path) -> None:
    model = classifier()
    optimizer = SGD(model.parameters(), lr=0.02)

    def slip(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 20.0 if step == 22 else 0.02

    run = train(tmp_path / "run", model, optimizer, steps=25, before_step=slip)

    finding = found(traindiff.check(run), "loss-spike")
    assert finding.step == 23
    assert (finding.evidence["moved_first"], finding.evidence["moved_in_step"]) == (
        "the learning rate of optimizer.groups[0]",
        22,
    )
    assert (
        "What moved first is the learning rate of optimizer.groups[0] in step 22, 1e+03 x as large as usual."
        in finding.message
    )


def test_a_gradient_that_is_clipped_still_spikes(tmp_path: Path) -> None:
    model = classifier()

    def batches(step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = points(step)
        return (30.0 * inputs.roll(1, 0) if step == 25 else inputs), labels

    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=0.05), steps=28, batches=batches, clip=0.5)

    finding = found(traindiff.check(run), "gradient-spike")
    assert (finding.step, finding.path) == (25, "(all parameters)")
    assert finding.evidence["value"] > 10.0 * finding.evidence["median"]


def test_one_batch_that_a_nearly_perfect_model_gets_wrong_is_no_spike(tmp_path: Path) -> None:
    model = classifier()

    def batches(step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = points(step)
        if step == 60:
            labels[0] = (labels[0] + 1) % 4
        return inputs, labels

    run = train(tmp_path / "run", model, AdamW(model.parameters(), lr=1e-2), steps=62, batches=batches)

    assert kinds(traindiff.check(run)) == set()


def test_a_loss_that_diverges_is_found(tmp_path: Path) -> None:
    model = classifier()
    optimizer = SGD(model.parameters(), lr=0.03, maximize=True)  # up instead of down
    verdict = traindiff.check(train(tmp_path / "run", model, optimizer, steps=24))

    finding = found(verdict, "diverging-loss")
    assert verdict.verdict == "unhealthy"
    assert (finding.step, finding.phase) == (19, "loss")
    assert finding.evidence["ended"] > 2.0 * finding.evidence["began"]


def test_a_loss_that_turns_negative_is_not_said_to_be_judged(tmp_path: Path) -> None:
    model = classifier()

    def without_bound(output: Tensor, labels: Tensor) -> Tensor:
        return 2.0 - output.gather(1, labels[:, None]).mean()

    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=0.3), steps=24, loss_of=without_bound)

    rules = {rule.name: rule for rule in traindiff.check(run).rules}
    assert rules["diverging-loss"].result == "not applicable"
    (why,) = rules["diverging-loss"].unknown
    needs = "It needs a single loss above 0, on which backward() is called in each step; the loss of step "
    assert re.fullmatch(r"\d+ is -[\d.]+", why.removeprefix(needs))


def test_a_loss_that_does_not_decrease_is_a_warning(tmp_path: Path) -> None:
    model = classifier()
    optimizer = SGD(model.parameters(), lr=1e-4)

    def chance(step: int) -> tuple[Tensor, Tensor]:
        inputs, _ = points(step)
        return inputs, torch.randint(4, (32,), generator=torch.Generator().manual_seed(step % 16))

    run = train(tmp_path / "run", model, optimizer, steps=48, batches=chance)

    verdict = traindiff.check(run, config={"stalled-loss": {"least_steps": 48}})
    assert "stalled-loss" in kinds(verdict)
    finding = found(verdict, "stalled-loss")
    assert finding.evidence["ended"] >= finding.evidence["began"]
    assert verdict.verdict == "healthy"
    assert "stalled-loss" not in kinds(traindiff.check(run))


class Growing(nn.Module):
    """Multiplies its input by a factor that a training may change; the norm behind it hides the factor."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize("ends", [30, 22])
def test_an_activation_that_grows_until_the_loss_spikes_is_what_moved_first(ends: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), Growing(), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))

    def grow(step: int) -> None:
        model[1].factor = 4.0 ** max(0, step - 19) if step < ends else 1.0

    def batches(step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = points(step)
        return inputs, (labels + 1) % 4 if step == 23 else labels

    optimizer = SGD(model.parameters(), lr=0.5)
    path = train(tmp_path / "run", model, optimizer, steps=30, batches=batches, before_step=grow)

    spikes = [one for one in traindiff.check(path).warnings if one.kind == "loss-spike"]
    began = {one.step: (one.evidence.get("moved_first"), one.evidence.get("moved_in_step")) for one in spikes}
    if ends == 30:
        assert began[23] == ("forward 1 output[0]", 20)
    else:
        assert began[23] != ("forward 1 output[0]", 20)
