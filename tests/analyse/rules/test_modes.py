"""Models that are trained in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn
from torch.optim import SGD

import traindiff
from tests.analyse.rules.small_trainings import classifier, convolutions, found, images, kinds, points, train
from traindiff.analyse.check import Verdict

Change = Callable[[nn.Module], object]


def trained(path: Path, model: nn.Module, changes: dict[int, Change], *, of_images: bool = False) -> Verdict:
    """What is said of a training in which modes change before some steps."""
    optimizer = SGD(model.parameters(), lr=0.01)

    def before_step(step: int) -> None:
        changes.get(step, lambda _: None)(model)

    batches = images if of_images else points
    return traindiff.check(train(path, model, optimizer, steps=12, before_step=before_step, batches=batches))


@pytest.mark.parametrize("of_images", [False, True])
def test_a_model_that_stays_in_evaluation_mode_is_a_warning(of_images: bool, tmp_path: Path) -> None:
    model = convolutions() if of_images else classifier(dropout=0.1)
    verdict = trained(tmp_path / "run", model, {6: nn.Module.eval}, of_images=of_images)

    finding = found(verdict, "trained-in-evaluation-mode")
    assert verdict.verdict == "healthy"
    assert (finding.step, finding.path) == (6, "")
    assert finding.evidence["modules"] == (["1", "4"] if of_images else ["1"])
    assert "Call model.train() after each evaluation" in finding.message


def test_a_model_that_returns_to_training_mode_is_right(tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", classifier(dropout=0.1), {6: nn.Module.eval, 8: nn.Module.train})

    assert (kinds(verdict), verdict.notes) == (set(), ())


@pytest.mark.parametrize("rate", [None, 0.0])
def test_the_mode_of_a_model_to_which_it_does_not_matter_is_not_judged(rate: float | None, tmp_path: Path) -> None:
    model = classifier(dropout=0.1) if rate is not None else classifier()
    if rate is not None:
        model[1].p = rate

    verdict = trained(tmp_path / "run", model, {6: nn.Module.eval})

    assert (kinds(verdict), verdict.notes) == (set(), ())


def freeze_statistics(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def test_statistics_that_are_frozen_before_each_pass_are_not_said_to_change(tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", convolutions(), {0: freeze_statistics}, of_images=True)

    assert kinds(verdict) == set()
    assert verdict.notes == ("In all steps, some modules are in evaluation mode: 1 and 1 more module.",)


def test_statistics_that_are_frozen_in_the_middle_get_a_note(tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", convolutions(), {6: freeze_statistics}, of_images=True)

    assert kinds(verdict) == set()
    assert verdict.notes == (
        "In the middle of the run (step 6), some modules go into evaluation mode, and stay in it: 1 and 1 more module.",
    )


def test_a_model_in_evaluation_mode_from_the_beginning_gets_a_note(tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", classifier(dropout=0.1).eval(), {})

    assert kinds(verdict) == set()
    assert verdict.notes == ("The model is in evaluation mode in all steps, so 1 computes as in an evaluation.",)


def test_the_note_names_a_model_that_is_a_single_layer(tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", nn.BatchNorm1d(20).eval(), {})

    assert verdict.notes == ("The model is in evaluation mode in all steps, so (root) computes as in an evaluation.",)


def test_statistics_that_are_frozen_from_the_beginning_are_not_worth_a_note(tmp_path: Path) -> None:
    model = convolutions()
    freeze_statistics(model)
    verdict = trained(tmp_path / "run", model, {}, of_images=True)

    assert (kinds(verdict), verdict.notes) == (set(), ())
