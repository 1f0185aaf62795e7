"""Faults of trainings under DeepSpeed, and of DeepSpeed 0.19.6 itself: found, and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import traindiff
from tests.observe.sharding.deepspeed_training import NEEDS_DEEPSPEED, PARTITION_ALL, torch_adam, train_plain, trained
from tests.on_ranks import run_on_ranks
from traindiff.core.site import PHASES

pytestmark = [NEEDS_DEEPSPEED, pytest.mark.deepspeed]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_clipping_by_default_is_named(stage: int, tmp_path: Path) -> None:
    train_plain(str(tmp_path / "plain"), loss_factor=4.0)
    how = {
        "loss_factor": 4.0,
        "config": {"gradient_clipping": 1.0},  # the default since 0.19.3
        "zero": PARTITION_ALL if stage == 3 else {},
        "observe": [*PHASES, "grad.stages"],
    }
    run_on_ranks(trained, 2, str(tmp_path / "run"), stage, how)

    comparison = traindiff.compare(tmp_path / "plain", tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.kind, first.step, first.phase, first.stage) == ("clipping", 0, "grad", "clipped"), str(comparison)
    assert "The candidate clips gradients to a norm of 1; the baseline does not clip." in first.message
    assert 'DeepSpeed does so by default since 0.19.3: write "gradient_clipping": 0.0' in first.message
    assert not [one for one in comparison.findings if one.stage == "reduced"]
    stages = {
        seen.stage for step in traindiff.open_recording(str(tmp_path / "run")).steps(0) for seen in step.observations
    }
    assert {"reduced", "clipped"} <= stages


def test_adamw_in_place_of_adam_is_named(tmp_path: Path) -> None:
    train_plain(str(tmp_path / "plain"), optimizer=torch_adam)
    config = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}}
    run_on_ranks(trained, 2, str(tmp_path / "run"), 1, {"optimizer": None, "config": config})

    comparison = traindiff.compare(tmp_path / "plain", tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.kind, first.slot) == ("hyper-parameter", "decoupled_weight_decay"), str(comparison)
    assert "asks DeepSpeed for Adam, and it makes AdamW of that" in first.message


def scale_the_loss(engine: Any) -> None:
    engine.optimizer.override_loss_scale(1024.0)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_scale_is_recorded_and_gradients_are_unscaled(stage: int, tmp_path: Path) -> None:
    how = {"after_making": scale_the_loss, "zero": PARTITION_ALL if stage == 3 else {}}
    run_on_ranks(trained, 2, str(tmp_path / "run"), stage, how)

    steps = traindiff.open_recording(str(tmp_path / "run")).steps(0)
    seen = [(one, summary) for step in steps for one, summary in zip(step.observations, step.summaries, strict=True)]
    assert {float(summary["sum"]) for one, summary in seen if one.path == "loss_scale"} == {1024.0}
    assert {one.phase for one, _ in seen if one.scaled} == {"loss", "backward"}
    assert {one.phase for one, _ in seen if not one.scaled} >= {"grad", "optimizer", "param"}
    train_plain(str(tmp_path / "plain"))
    comparison = traindiff.compare(tmp_path / "plain", tmp_path / "run")
    assert comparison.verdict == "equivalent", str(comparison)


def forget_to_scale_the_loss(engine: Any) -> None:
    """As without ZeRO in float16: the optimizer divides by a scale that nothing was multiplied by (in 0.19.6)."""
    engine.optimizer.loss_scale_config.cur_scale = 1024.0


def test_dividing_by_a_loss_scale_that_was_never_applied_is_found(tmp_path: Path) -> None:
    bfloat16 = {"config": {"bf16": {"enabled": True}}}
    run_on_ranks(trained, 2, str(tmp_path / "right"), 0, bfloat16)
    run_on_ranks(trained, 2, str(tmp_path / "run"), 0, {**bfloat16, "after_making": forget_to_scale_the_loss})

    comparison = traindiff.compare(tmp_path / "right", tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.kind, first.step, first.phase) == ("scale", 0, "grad"), str(comparison)
    assert first.message == "All gradients are 0.0009766 x the baseline's."  # 1 / 1024


def test_a_step_that_is_taken_before_the_first_is_found(tmp_path: Path) -> None:
    """Without ZeRO in bfloat16, DeepSpeed 0.19.6 steps once with gradients of zero when it makes the optimizer."""
    train_plain(str(tmp_path / "plain"), dtype=torch.bfloat16)
    run_on_ranks(trained, 2, str(tmp_path / "run"), 0, {"config": {"bf16": {"enabled": True}}})

    comparison = traindiff.compare(tmp_path / "plain", tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.kind, first.step, first.slot) == ("step-count", 0, "step"), str(comparison)
