"""Tensors that are about to overflow are a warning; what masks are filled with, and what is scaled, is not."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD

import traindiff
from tests.analyse.rules.small_trainings import classifier, found, kinds, train


def test_activations_near_the_end_of_float16_are_a_warning(tmp_path: Path) -> None:
    model = classifier()
    with torch.no_grad():
        model[2].weight.mul_(8000.0)
        model[4].weight.mul_(1e-6)
    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=1e-6), steps=3, autocast=torch.float16)

    verdict = traindiff.check(run)
    finding = found(verdict, "near-overflow")
    assert verdict.verdict == "healthy"
    assert (finding.step, finding.phase, finding.path) == (0, "forward", "2")
    assert 65504 / 4 < finding.evidence["largest"] < 65504
    assert finding.evidence["end"] == 65504
    assert "float16 ends at 65504" in finding.message


def test_the_same_activations_are_right_in_bfloat16(tmp_path: Path) -> None:
    model = classifier()
    with torch.no_grad():
        model[2].weight.mul_(8000.0)
        model[4].weight.mul_(1e-6)
    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=1e-6), steps=3, autocast=torch.bfloat16)

    assert kinds(traindiff.check(run)) == set()


class FillsMasks(nn.Module):
    """Scores of which some are filled with the smallest number that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.fill = nn.Linear(20, 4), Fill()

    def forward(self, x: Tensor) -> Tensor:
        filled: Tensor = self.fill(self.scores(x))
        return filled.softmax(-1)


class Fill(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(torch.arange(4) == 3, torch.finfo(x.dtype).min)


def test_what_masks_are_filled_with_is_no_overflow(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FillsMasks()
    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=0.1), steps=3)

    assert kinds(traindiff.check(run)) == set()


def test_gradients_that_a_loss_scale_makes_large_are_right(tmp_path: Path) -> None:
    model = classifier()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
    run = train(
        tmp_path / "run", model, SGD(model.parameters(), lr=0.1), steps=3, autocast=torch.float16, scaler=scaler
    )

    assert kinds(traindiff.check(run)) == set()
