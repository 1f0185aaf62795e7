"""Updates by settings that the optimizer has no more, or that belong to other parameters, are found and named."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR

import traindiff
from tests.analyse.rules.test_replay import findings
from tests.observe.hooks.trainings import batches

Change = Callable[[int, dict[str, Any]], dict[str, Any]]


def train(path: Path, *, change: Change = lambda _, given: given, one_group: bool = False, early: bool = False) -> None:
    """Train a model with a norm and biases, which do not decay, under a schedule.

    Args:
        path: Where to record.
        change: Given the step and the options that AdamW passes on to compute its update; what is computed with.
        one_group: All parameters are in one group, and decay.
        early: The scheduler steps before the optimizer does.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 48), nn.LayerNorm(48), nn.Tanh(), nn.Linear(48, 12))
    parameters, step = list(model.parameters()), 0
    groups: Any = [
        {"params": [one for one in parameters if one.dim() == 2], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = AdamW(parameters if one_group else groups, lr=0.01, weight_decay=0.1)
    scheduler = ExponentialLR(optimizer, 0.8)
    inside = inspect.unwrap(Adam.step).__globals__
    right = inside["adam"]

    def computed(*tensors: Any, **options: Any) -> None:
        right(*tensors, **change(step, options))

    with pytest.MonkeyPatch.context() as patched, traindiff.record(path, model, optimizer, strict=True):
        patched.setitem(inside, "adam", computed)
        for step, batch in enumerate(batches(6)):  # noqa: B007 - `computed` reads it
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            if early:
                scheduler.step()
            optimizer.step()
            if not early:
                scheduler.step()


@pytest.fixture
def replays_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traindiff.observe.torch.hooks.optimizer_replay.FIRST", 100)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.usefixtures("replays_every_step")
def test_right_settings_are_no_finding(tmp_path: Path) -> None:
    for name, how in {"groups": {}, "one": {"one_group": True}, "early": {"early": True}}.items():
        train(tmp_path / name, **how)
        verdict = traindiff.check(tmp_path / name)
        assert (verdict.verdict, verdict.warnings) == ("healthy", ()), str(verdict)


@pytest.mark.usefixtures("replays_every_step")
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_the_learning_rate_of_an_earlier_step_is_named_with_the_step(kept: int, tmp_path: Path) -> None:
    """As by an optimizer whose step was compiled or captured with the learning rate of that time."""
    train(tmp_path / "run", change=lambda step, given: {**given, "lr": 0.01 * 0.8 ** min(step, kept)})

    found = [one for one in traindiff.check(tmp_path / "run").findings if one.path == "0.weight"]
    (first,) = found
    assert (first.step, first.kind) == (kept + 1, "update-rule")
    rate = 0.01 * 0.8**kept
    assert f"moves 0.weight as if lr were {rate:g}, as in the step before." in first.message
    (later,) = [one for one in findings(tmp_path / "run") if (one.path, one.step) == ("0.weight", kept + 3)]
    assert later.evidence["step_of_rate"] == kept
    expected = f"moves 0.weight as if the learning rate were {0.8**-3:.4g} x what it is, which is that of step {kept}."
    assert expected in later.message


def decaying(_step: int, given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "weight_decay": 0.1}


def test_norms_and_biases_that_decay_although_their_group_does_not_are_named(tmp_path: Path) -> None:
    train(tmp_path / "run", change=decaying)

    found = {one.path: one for one in traindiff.check(tmp_path / "run").findings}
    assert set(found) == {"0.bias", "1.weight", "1.bias", "3.bias"}
    assert found["1.weight"].message.startswith("AdamW moves 1.weight as if weight_decay were 0.1, as in groups[0].")


def test_a_comparison_names_the_parameters_that_decay_in_one_run_only(tmp_path: Path) -> None:
    train(tmp_path / "groups")
    train(tmp_path / "one", one_group=True)
    train(tmp_path / "decaying", change=decaying)

    first = traindiff.compare(tmp_path / "groups", tmp_path / "one").first_divergence
    assert first is not None
    assert (first.phase, first.slot) == ("optimizer", "weight_decay")
    assert "weight_decay is 0 in the baseline and 0.1 in the candidate, for 4 parameters (0.bias, " in first.message
    first = traindiff.compare(tmp_path / "groups", tmp_path / "decaying").first_divergence
    assert first is not None
    assert "In the candidate, AdamW moves 0.bias as if weight_decay were 0.1, as in groups[0]." in first.message
    assert "does not tell it from" not in first.message  # 0.1 is also a usual value, and that is no other mistake


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_a_comparison_names_the_learning_rate_of_a_scheduler_that_steps_too_early(tmp_path: Path) -> None:
    train(tmp_path / "late")
    train(tmp_path / "early", early=True)

    first = traindiff.compare(tmp_path / "late", tmp_path / "early").first_divergence
    assert first is not None
    assert (first.step, first.phase, first.slot) == (0, "optimizer", "lr")
    assert "lr is 0.01 in the baseline and 0.008 in the candidate" in first.message
