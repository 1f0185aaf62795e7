"""A module that takes the place of another while the training runs, and the optimizers that hold one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import traindiff

Reaction = Callable[[nn.Sequential, Optimizer], Optimizer]


def train(path: Path, reaction: Reaction, *, steps: int = 8, steps_before: int = 3) -> Path:
    """Replace the head after some steps, and let the optimizer react."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer: Optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        for step in range(steps):
            if step == steps_before:
                torch.manual_seed(1)
                model[2] = nn.Linear(16, 3)
                optimizer = reaction(model, optimizer)
            optimizer.zero_grad()
            model(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
    return path


def made_anew(model: nn.Sequential, _: Optimizer) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def given_the_new_parameters(model: nn.Sequential, optimizer: Optimizer) -> Optimizer:
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    return optimizer


def left_alone(_: nn.Sequential, optimizer: Optimizer) -> Optimizer:
    return optimizer


def of_the_head_alone(model: nn.Sequential, _: Optimizer) -> Optimizer:
    return Adam(model[2].parameters(), lr=0.1)


@pytest.mark.parametrize("reaction", [made_anew, given_the_new_parameters])
def test_an_optimizer_that_holds_the_new_head_is_right(reaction: Reaction, tmp_path: Path) -> None:
    checked = traindiff.check(train(tmp_path / "run", reaction))

    assert checked.verdict == "healthy"
    assert [one.kind for one in checked.warnings if "2.weight" in one.evidence.get("paths", ())] == ["edited"]
    other = traindiff.compare(train(tmp_path / "b", made_anew), train(tmp_path / "c", reaction))
    assert (other.verdict, other.findings) == ("identical", ())


def test_the_head_that_no_optimizer_holds_is_named_with_the_cause(tmp_path: Path) -> None:
    run = train(tmp_path / "run", left_alone)
    checked = traindiff.check(run)

    found = {one.path: one for one in checked.findings if one.kind == "never-updated"}
    assert checked.verdict == "unhealthy"
    assert set(found) == {"2.weight", "2.bias"}
    assert found["2.weight"].step == 3
    assert "The optimizer goes on with the tensor that had its place in the model before." in found["2.weight"].message
    idle = {one.path: one.message for one in checked.warnings if one.kind == "no-gradient"}
    assert "The optimizer holds it, and the recorded model does not" in idle["optimizer.groups[0].params[2]"]
    assert "detach()" not in idle["optimizer.groups[0].params[2]"]

    first = traindiff.compare(train(tmp_path / "b", made_anew), run).first_divergence
    assert first is not None
    assert (first.step, first.path) == (3, "2.weight")
    assert first.message.startswith("The candidate's optimizer does not hold 2.weight; the baseline's does.")


def test_a_phase_that_trains_the_new_head_alone_is_healthy(tmp_path: Path) -> None:
    checked = traindiff.check(train(tmp_path / "run", of_the_head_alone))

    assert [one.kind for one in checked.findings if one.kind == "never-updated"] == []
