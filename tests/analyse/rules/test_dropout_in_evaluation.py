"""Dropout that is active while a model is evaluated is a warning; all other zeros are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

import traindiff
from tests.analyse.rules.small_trainings import classifier, found, kinds, points, train


def evaluated(path: Path, model: nn.Module, *, forgets: bool) -> Path:
    """A training that evaluates its model after each step."""

    def evaluate(step: int) -> None:
        model.train(forgets)
        with torch.no_grad():
            model(points(1000 + step, samples=64)[0])
        model.train()

    optimizer = SGD(model.parameters(), lr=0.01)
    return train(path, model, optimizer, steps=4, after_step=evaluate, evaluation=True)


def test_dropout_that_is_active_in_evaluation_is_a_warning(tmp_path: Path) -> None:
    verdict = traindiff.check(evaluated(tmp_path / "run", classifier(dropout=0.2), forgets=True))

    finding = found(verdict, "dropout-in-evaluation")
    assert verdict.verdict == "healthy"
    assert (finding.step, finding.phase, finding.stage, finding.path) == (1, "forward", "evaluation", "1")
    assert finding.evidence["share"] == pytest.approx(0.2, abs=0.04)
    assert "Call model.eval() before evaluating" in finding.message


def test_dropout_that_rests_in_evaluation_is_right(tmp_path: Path) -> None:
    assert kinds(traindiff.check(evaluated(tmp_path / "run", classifier(dropout=0.2), forgets=False))) == set()


class BehindRelu(nn.Module):
    """Dropout of what has zeros anyway, called as functions are."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(20, 32), nn.Dropout(share), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.dropout(torch.relu(self.first(x))))
        return result


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_zeros_of_a_relu_are_not_put_down_to_dropout(share: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert kinds(traindiff.check(evaluated(tmp_path / "run", BehindRelu(share), forgets=False))) == set()


def test_dropout_of_nothing_is_never_active(tmp_path: Path) -> None:
    model = classifier(dropout=0.5)
    model[1].p = 0.0
    assert kinds(traindiff.check(evaluated(tmp_path / "run", model, forgets=True))) == set()
