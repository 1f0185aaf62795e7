"""Second moments of Adam that are lost, or smaller than eps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

import traindiff
from tests.analyse.rules.small_trainings import classifier, found, kinds, train


def test_second_moments_that_float32_loses_are_found(tmp_path: Path) -> None:
    model = classifier()

    def tiny(outputs: Tensor, labels: Tensor) -> Tensor:
        return 1e-22 * F.cross_entropy(outputs, labels)

    run = train(tmp_path / "run", model, Adam(model.parameters(), lr=1e-3), steps=8, loss_of=tiny)

    verdict = traindiff.check(run)
    finding = found(verdict, "zero-second-moment")
    assert verdict.verdict == "unhealthy"
    assert (finding.phase, finding.slot, finding.step) == ("optimizer", "exp_avg_sq", 0)
    assert finding.evidence["share"] > 0.9
    assert "Adam then divides by eps alone" in finding.message


class Forgetful(Adam):
    """Adam that sets its second moments to zero after each step."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for state in self.state.values():
            state["exp_avg_sq"].zero_()
        return result


def test_second_moments_that_something_sets_to_zero_are_not_said_to_be_rounded(tmp_path: Path) -> None:
    model = classifier()
    verdict = traindiff.check(train(tmp_path / "run", model, Forgetful(model.parameters(), lr=1e-6), steps=8))

    message = found(verdict, "zero-second-moment").message
    assert "Rounding does not explain that: the squares are within the range of float32" in message
    assert "float32, or scale the loss up" not in message


def test_an_eps_that_is_larger_than_all_gradients_is_a_warning(tmp_path: Path) -> None:
    model = classifier()
    verdict = traindiff.check(train(tmp_path / "run", model, Adam(model.parameters(), lr=1e-3, eps=10.0), steps=12))

    finding = found(verdict, "eps-dominates")
    assert verdict.verdict == "healthy"
    assert (finding.slot, finding.step, finding.evidence["eps"]) == ("exp_avg_sq", 0, 10.0)
    assert 0.0 < finding.evidence["largest_root"] < 10.0


def test_a_large_eps_that_most_elements_exceed_is_right(tmp_path: Path) -> None:
    model = classifier()
    run = train(tmp_path / "run", model, Adam(model.parameters(), lr=1e-3, eps=1e-4), steps=12)

    assert kinds(traindiff.check(run)) == set()


def test_a_parameter_without_gradient_has_no_moments_to_lose(tmp_path: Path) -> None:
    model = classifier()
    with torch.no_grad():
        model[2].bias.fill_(-100.0)
    run = train(tmp_path / "run", model, Adam(model.parameters(), lr=1e-3), steps=12)

    assert not kinds(traindiff.check(run)) & {"zero-second-moment", "eps-dominates"}
