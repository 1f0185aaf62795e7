"""Which modules draw random numbers in evaluation mode, and which spectral norms were not estimated, is recorded."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm
from torch.optim import SGD

import traindiff
from tests.observe.hooks.reading import rows
from tests.observe.hooks.test_removal import assert_nothing_left
from traindiff.core.observation import DRAWS, ESTIMATE


class Noise(nn.Module):
    """Adds noise in every mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


def noisy() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), Noise(), nn.Dropout(0.5))
    return nn.Sequential(nn.Linear(6, 8), inner, Noise(), spectral_norm(nn.Linear(8, 2)))


def train(path: Path, model: nn.Module, *, evaluated_first: bool = True, **settings: Any) -> Path:
    """Three steps, with an evaluation before each."""
    optimizer = SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    with traindiff.record(path, model, optimizer, strict=True, **settings):
        for step in range(3):
            if step or evaluated_first:
                model.eval()
                with torch.no_grad():
                    model(torch.randn(4, 6))
                model.train()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_the_innermost_module_that_draws_is_recorded_in_the_step_of_its_evaluation(tmp_path: Path) -> None:
    found = rows(train(tmp_path / "run", noisy(), evaluation=True), stage=DRAWS)

    assert [(seen.step, seen.path, seen.slot) for seen, _ in found] == [
        (step, path, "drawn") for step in range(3) for path in ("1.1", "2")
    ]


def test_without_evaluations_no_draw_is_recorded(tmp_path: Path) -> None:
    assert rows(train(tmp_path / "run", noisy()), stage=DRAWS) == []


def test_an_estimate_is_recorded_until_training_has_made_it_one(tmp_path: Path) -> None:
    ((seen, summary),) = rows(train(tmp_path / "run", noisy()), stage=ESTIMATE)

    assert (seen.step, seen.phase, seen.path, seen.slot) == (0, "forward", "3.weight", "sigma")
    assert -1.0 < float(summary["sum"]) < 0.5
    assert rows(train(tmp_path / "later", noisy(), evaluated_first=False), stage=ESTIMATE) == []


@pytest.mark.parametrize("evaluation", [False, True])
def test_nothing_is_left_of_it(evaluation: bool, tmp_path: Path) -> None:
    model = noisy()
    norms = dict(model[3]._forward_pre_hooks)
    train(tmp_path / "run", model, evaluation=evaluation)

    assert dict(model[3]._forward_pre_hooks) == norms
    model[3]._forward_pre_hooks.clear()
    model[3]._state_dict_hooks.clear()
    assert_nothing_left(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_the_training_computes_the_same_bits(tmp_path: Path) -> None:
    models = [noisy(), noisy(), noisy()]
    train(tmp_path / "plain", models[0], observe=["param"])
    train(tmp_path / "default", models[1])
    train(tmp_path / "evaluation", models[2], evaluation=True)

    for one, *others in zip(*(model.state_dict().values() for model in models), strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_runs_with_and_without_it_are_identical(tmp_path: Path) -> None:
    with_it = train(tmp_path / "with", noisy(), evaluation=True)
    without_it = train(tmp_path / "without", noisy())

    assert traindiff.compare(with_it, without_it).verdict == "identical"


def test_weights_that_are_not_numbers_have_no_estimate(tmp_path: Path) -> None:
    model = noisy()
    with torch.no_grad():
        model[3].weight_orig.fill_(torch.nan)
    optimizer = SGD(model.parameters(), lr=0.01)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        model.eval()
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()

    assert rows(tmp_path / "run", stage=ESTIMATE) == []
