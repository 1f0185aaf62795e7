"""Loss scalers that leave out too many steps."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.optim import SGD

import traindiff
from tests.analyse.rules.small_trainings import classifier, found, kinds, train


def overflowing(path: Path, *, steps: int, scale: float, times: int) -> Path:
    """A training in which so many steps have an infinite gradient, whatever the scale."""
    model = classifier()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)

    def overflow(step: int) -> None:
        if step < times:
            model[2].weight.grad[0, 0] = torch.inf

    return train(path, model, SGD(model.parameters(), lr=0.01), steps=steps, scaler=scaler, after_backward=overflow)


def test_a_scaler_that_leaves_out_most_steps_is_found(tmp_path: Path) -> None:
    verdict = traindiff.check(overflowing(tmp_path / "run", steps=26, scale=2.0**40, times=24))

    finding = found(verdict, "skipped-steps")
    assert verdict.verdict == "unhealthy"
    assert (finding.step, finding.path) == (20, "2.weight")
    assert (finding.evidence["left_out"], finding.evidence["scale"]) == (21, 2.0**20)
    assert kinds(verdict) == {"skipped-steps"}


def test_a_scaler_that_overflows_at_a_scale_of_1_is_found(tmp_path: Path) -> None:
    verdict = traindiff.check(overflowing(tmp_path / "run", steps=8, scale=4.0, times=4))

    finding = found(verdict, "loss-scale-floor")
    assert (finding.step, finding.phase, finding.path) == (2, "grad", "2.weight")
    assert finding.evidence == {"scale": 1.0, "num_steps": 2}
    assert kinds(verdict) == {"loss-scale-floor"}


def test_a_scaler_that_finds_its_scale_is_right(tmp_path: Path) -> None:
    assert kinds(traindiff.check(overflowing(tmp_path / "run", steps=24, scale=2.0**16, times=12))) == set()
