"""A model that suddenly returns the same for all samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import traindiff
from tests.analyse.rules.small_trainings import found, kinds, points, train
from traindiff.analyse.check import Verdict


class Copy(nn.Module):
    """A copy to another device, which may fail."""

    mode = "right"

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "zeros":
            return torch.zeros_like(x)
        return x[:1].expand_as(x).clone() if self.mode == "stale" else x.clone()


def model_with_copy(*, squash: bool = False) -> nn.Sequential:
    """Two halves with a copy between them; the output may be saturated."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 32), nn.GELU(), Copy(), nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)]
    return nn.Sequential(*layers, *([nn.Softmax(dim=-1)] if squash else []))


def trained(path: Path, model: nn.Sequential, modes: dict[int, str], dtype: torch.dtype | None = None) -> Verdict:
    """What is said of a training whose copy fails in some steps."""

    def before_step(step: int) -> None:
        model[2].mode = modes.get(step, "right")

    optimizer = SGD(model.parameters(), lr=0.02)
    return traindiff.check(train(path, model, optimizer, steps=14, before_step=before_step, autocast=dtype))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("mode", "what"), [("zeros", "zero"), ("stale", "the same in all rows")])
def test_activations_that_are_lost_in_one_step_are_a_warning(
    mode: str, what: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    verdict = trained(tmp_path / "run", model_with_copy(), {9: mode}, dtype)

    finding = found(verdict, "constant-output")
    assert verdict.verdict == "healthy"
    assert (finding.step, finding.phase, finding.path) == (9, "forward", "2")
    assert f"The first output that is {what} is 2 output[0]." in finding.message


def test_a_model_that_loses_nothing_is_right(tmp_path: Path) -> None:
    assert kinds(trained(tmp_path / "run", model_with_copy(), {})) == set()


def test_outputs_that_are_the_same_from_the_beginning_are_no_surprise(tmp_path: Path) -> None:
    always = dict.fromkeys(range(14), "zeros")

    assert "constant-output" not in kinds(trained(tmp_path / "run", model_with_copy(), always))


def test_one_batch_of_padding_is_the_matter_of_another_rule(tmp_path: Path) -> None:
    model = model_with_copy()

    def batches(step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = points(step)
        return torch.zeros_like(inputs) if step == 9 else inputs, labels

    verdict = traindiff.check(
        train(tmp_path / "run", model, SGD(model.parameters(), lr=0.02), steps=14, batches=batches)
    )

    assert kinds(verdict) == {"zero-batch"}


class Saturating(nn.Module):
    """Returns the shares of classes, which are 0 and 1 from a step on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.softmax, self.sharpness = nn.Linear(20, 4), nn.Softmax(dim=-1), 1.0

    def forward(self, x: Tensor) -> Tensor:
        shares: Tensor = self.softmax(self.sharpness * self.linear(x))
        return shares


def test_outputs_that_saturate_differ_still(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Saturating()

    def sharpen(step: int) -> None:
        model.sharpness = 1e6 if step >= 8 else 1.0

    path = train(
        tmp_path / "run", model, SGD(model.parameters(), lr=1e-9), steps=12, before_step=sharpen,
        loss_of=lambda shares, labels: functional.nll_loss(shares, labels) + 2.0,
    )  # fmt: skip

    assert "constant-output" not in kinds(traindiff.check(path))


class Skipping(nn.Module):
    """A residual block that is left out in some steps (stochastic depth)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.skips = nn.Linear(32, 32), False

    def forward(self, x: Tensor) -> Tensor:
        branch = functional.gelu(self.linear(x))
        return torch.zeros_like(branch) if self.skips else branch


def test_a_branch_that_returns_zeros_beside_a_residual_is_legal(tmp_path: Path) -> None:
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.branch, self.head = nn.Linear(20, 32), Skipping(), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            logits: Tensor = self.head(x + self.branch(x))
            return logits

    model = Residual()

    def before_step(step: int) -> None:
        model.branch.skips = step in (6, 9)

    optimizer = SGD(model.parameters(), lr=0.02)
    assert kinds(traindiff.check(train(tmp_path / "run", model, optimizer, steps=12, before_step=before_step))) == set()
