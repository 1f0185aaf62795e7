"""Recordings that were not asked for the same: what they share is compared, the rest is no divergence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import traindiff
from tests.faults.recipe import Moment, recipe
from traindiff.analyse.compare import Comparison

ALL = ["batch", "forward", "loss", "backward", "grad", "optimizer", "update", "param"]
Pair = Callable[..., Comparison]


@pytest.fixture
def recorded(tmp_path: Path) -> Pair:
    """Compare a training with itself, recorded with other settings."""

    def run(baseline: dict[str, Any] | None = None, candidate: dict[str, Any] | None = None) -> Comparison:
        training = recipe("mlp").but(steps=4, before_step=_evaluate)
        return traindiff.compare(
            training.run(tmp_path / "baseline", **(baseline or {})),
            training.run(tmp_path / "candidate", **(candidate or {})),
        )

    return run


def _evaluate(now: Moment) -> None:
    with torch.no_grad():
        now.model(now.inputs)


def test_a_phase_that_one_run_did_not_record_is_said_and_no_divergence(recorded: Pair) -> None:
    comparison = recorded(candidate={"observe": ["grad", "param"]})

    assert comparison.verdict == "incomplete"
    assert not comparison.findings
    assert comparison.notes[0] == (
        "Not recorded in the candidate, so not compared: batch, forward, loss, backward, optimizer."
    )


@pytest.mark.parametrize("side", ["baseline", "candidate"])
@pytest.mark.parametrize(
    ("settings", "what"), [({"evaluation": True}, "evaluation"), ({"observe": [*ALL, "grad.micro"]}, "grad.micro")]
)
def test_what_comes_on_top_in_one_run_is_no_divergence(
    recorded: Pair, side: str, settings: dict[str, Any], what: str
) -> None:
    comparison = recorded(**{side: settings})

    assert comparison.verdict == "identical", str(comparison)
    other = "candidate" if side == "baseline" else "baseline"
    assert comparison.notes == (f"Not recorded in the {other}, so not compared: {what}.",)


@pytest.mark.parametrize("side", ["baseline", "candidate"])
@pytest.mark.parametrize("settings", [{"every": 2}, {"steps": "1-2"}, {"steps": "0,3"}, {"every": 3}])
def test_steps_that_one_run_did_not_record_are_passed_over(recorded: Pair, side: str, settings: dict[str, Any]) -> None:
    comparison = recorded(**{side: settings})

    assert comparison.verdict == "identical", str(comparison)
    assert comparison.notes == ()
    assert len(comparison.steps) == 2


def test_a_part_of_the_model_is_compared_and_called_a_part(recorded: Pair) -> None:
    comparison = recorded(candidate={"select": "fc*"})

    assert comparison.verdict == "incomplete"
    assert not comparison.findings
    assert not comparison.unaligned[1]
