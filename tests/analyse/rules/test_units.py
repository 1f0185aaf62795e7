"""Units that are dead or saturated."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, AdamW

import traindiff
from tests.analyse.rules.small_trainings import classifier, convolutions, found, images, kinds, train


def test_a_layer_whose_units_are_dead_is_found(tmp_path: Path) -> None:
    model = classifier(width=64)
    with torch.no_grad():
        model[2].bias[:48] = -100.0
    verdict = traindiff.check(train(tmp_path / "run", model, SGD(model.parameters(), lr=0.01), steps=12))

    finding = found(verdict, "dead-units")
    assert verdict.verdict == "unhealthy"
    assert (finding.phase, finding.path, finding.step) == ("forward", "3", 0)
    assert (finding.evidence["dead"], finding.evidence["units"], finding.evidence["num_steps"]) == (48, 64, 12)
    assert "At least 48 of 64 units of 3 are dead" in finding.message


def test_channels_that_die_during_a_training_are_found_with_the_step(tmp_path: Path) -> None:
    model = convolutions()
    model.eval()  # the bias of a batch normalization is what decides

    def kill(step: int) -> None:
        if step == 4:
            with torch.no_grad():
                model[1].bias[:6] = -1000.0

    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=1e-3), steps=16, batches=images, before_step=kill)

    finding = found(traindiff.check(run, rules="dead-units"), "dead-units")
    assert (finding.path, finding.step, finding.evidence["dead"], finding.evidence["units"]) == ("2", 4, 6, 8)


def test_units_that_return_nan_are_not_called_dead(tmp_path: Path) -> None:
    def break_it(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model[0].weight.fill_(torch.nan)

    model = classifier(width=64)
    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=0.01), steps=16, before_step=break_it)

    assert kinds(traindiff.check(run)) == {"edited", "non-finite"}


def test_units_behind_a_layer_that_returns_zeros_are_dead(tmp_path: Path) -> None:
    """Its inputs are zeros, as behind a function that is dead, and a normalization stands between them."""
    model = nn.Sequential(nn.Linear(20, 32, bias=False), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))
    nn.init.zeros_(model[0].weight)
    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=0.01), steps=12)

    assert found(traindiff.check(run), "dead-units").path == "2"


def test_few_dead_units_are_none(tmp_path: Path) -> None:
    model = classifier(width=64)
    with torch.no_grad():
        model[2].bias[:16] = -100.0
    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=0.01), steps=12)

    assert kinds(traindiff.check(run)) == set()
    assert kinds(traindiff.check(run, config={"dead-units": {"share": 0.2}})) == {"dead-units"}


def test_a_saturated_layer_is_a_warning(tmp_path: Path) -> None:
    model = classifier(nn.Tanh)
    with torch.no_grad():
        model[0].weight.mul_(2000.0)
    verdict = traindiff.check(train(tmp_path / "run", model, AdamW(model.parameters(), lr=1e-3), steps=12))

    finding = found(verdict, "saturated-units")
    assert verdict.verdict == "healthy"
    assert (finding.phase, finding.path, finding.step) == ("forward", "1", 0)
    assert finding.evidence["sensitivity"] < 0.01
    assert "1 (Tanh) is saturated" in finding.message


def test_saturated_sigmoids_are_a_warning_and_a_sure_classifier_is_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Sigmoid(), nn.Linear(32, 4), nn.Sigmoid())
    with torch.no_grad():
        model[0].weight.mul_(2000.0)
        model[2].weight.mul_(2000.0)
    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=1e-3), steps=12)

    saturated = {one.path for one in traindiff.check(run).warnings if one.kind == "saturated-units"}

    assert saturated == {"1"}
