"""DeepSpeed's ZeRO stages against one process on the gathered batch, and against each other."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import traindiff
from tests.engines.deepspeed_training import counted_collectives, torch_adam, train_engine, train_plain
from traindiff.sessions.ranks import run_on_ranks
from traindiff.site import PHASES

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is not installed (pip install 'traindiff[deepspeed]', or: make test-deepspeed)",
    ),
]

PARTITION_ALL = {"stage3_param_persistence_threshold": 0}
"""Without it, ZeRO stage 3 keeps all parameters of so small a model gathered."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "run"
    train_plain(str(path))
    return path


@pytest.fixture(scope="module")
def stage_0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stage-0") / "run"
    run_on_ranks(trained, 2, str(path), 0, {})
    return path


def trained(path: str | None, stage: int, settings: dict[str, Any]) -> list[list[float]]:
    return train_engine(path, stage, **settings)


def compared(baseline: Path, candidate: Path) -> traindiff.Comparison:
    comparison = traindiff.compare(baseline, candidate)
    assert not any(comparison.unaligned), str(comparison)
    return comparison


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_is_equivalent_to_one_process_and_identical_to_stage_0(
    stage: int, reference: Path, stage_0: Path, tmp_path: Path
) -> None:
    run_on_ranks(trained, 2, str(tmp_path / "run"), stage, {"zero": PARTITION_ALL if stage == 3 else {}})

    comparison = compared(reference, tmp_path / "run")
    assert comparison.verdict == "equivalent", str(comparison)
    assert {row.phase for row in comparison.differences} == {
        "batch", "forward", "loss", "backward", "grad", "optimizer", "update", "param",
    }  # fmt: skip
    comparison = compared(stage_0, tmp_path / "run")
    assert comparison.verdict == "identical", str(comparison)


OFFLOADED = {"zero": {"offload_optimizer": {"device": "cpu"}}, "config": {"zero_force_ds_cpu_optimizer": False}}
"""The optimizer's state on the CPU, and torch's AdamW to step it."""

OWN_ADAMW = {"optimizer": None, "config": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}}
"""FusedAdam, or DeepSpeedCPUAdam where it is offloaded; both are compiled when first used."""

SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "2, round robin": (2, {"zero": {"round_robin_gradients": True}}),
    "3, sub-groups": (3, {"zero": {**PARTITION_ALL, "sub_group_size": 500}}),
    "3, gathered": (3, {}),
    "1, the optimizer inside is given": (1, {"given": "inner", "root": "module"}),
    "3, no optimizer is given": (3, {"given": "none", "zero": PARTITION_ALL}),
    "2, no optimizer is given": (2, {"given": "none", "root": "module"}),
    "1, offloaded": (1, OFFLOADED),
    "2, offloaded": (2, OFFLOADED),
    "3, offloaded": (3, {**OFFLOADED, "zero": {**PARTITION_ALL, **OFFLOADED["zero"]}}),
    "1, DeepSpeed's own Adam": (1, OWN_ADAMW),
    "3, DeepSpeed's own Adam": (3, {**OWN_ADAMW, "zero": PARTITION_ALL}),
    "2, DeepSpeed's own Adam, offloaded": (2, {**OWN_ADAMW, "zero": OFFLOADED["zero"]}),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_ways_of_recording_and_partitioning_are_equivalent(settings: str, reference: Path, tmp_path: Path) -> None:
    stage, how = SETTINGS[settings]
    run_on_ranks(trained, 2, str(tmp_path / "run"), stage, how)

    comparison = compared(reference, tmp_path / "run")
    assert comparison.verdict == "equivalent", str(comparison)


@pytest.mark.parametrize(("stage", "world_size"), [(1, 2), (2, 4), (3, 4)])
def test_accumulated_micro_batches_are_equivalent(stage: int, world_size: int, tmp_path: Path) -> None:
    train_plain(str(tmp_path / "plain"), micro_batches=2)
    how = {"micro_batches": 2, "zero": PARTITION_ALL if stage == 3 else {}}
    run_on_ranks(trained, world_size, str(tmp_path / "run"), stage, how)

    comparison = compared(tmp_path / "plain", tmp_path / "run")
    assert comparison.verdict == "equivalent", str(comparison)


def trained_and_counted(path: str | None, stage: int, settings: dict[str, Any]) -> list[Any]:
    with counted_collectives() as called:
        numbers = trained(path, stage, settings)
    return [numbers, called]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_recording_changes_no_bit_and_calls_no_collective(stage: int, tmp_path: Path) -> None:
    how = {"micro_batches": 2, "zero": PARTITION_ALL if stage == 3 else {}}
    plain = run_on_ranks(trained_and_counted, 2, None, stage, how)
    recorded = run_on_ranks(trained_and_counted, 2, str(tmp_path / "run"), stage, how)

    assert recorded == plain
    assert plain[0][1], "no collective was counted"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_is_equivalent_and_master_weights_are_recorded(stage: int, tmp_path: Path) -> None:
    train_plain(str(tmp_path / "plain"), dtype=torch.bfloat16)
    how = {"config": {"bf16": {"enabled": True}}, "zero": PARTITION_ALL if stage == 3 else {}}
    run_on_ranks(trained, 2, str(tmp_path / "run"), stage, how)

    comparison = compared(tmp_path / "plain", tmp_path / "run")
    assert comparison.verdict == "equivalent", str(comparison)
    dtypes = {slot: dtype for slot, dtype, _ in observed(tmp_path / "run", path="blocks.0.up.weight", phase="param")}
    assert dtypes == {"value": "bfloat16", "master": "float32"}


def observed(run: Path, *, path: str, phase: str) -> list[tuple[str, str, int]]:
    """Slot, dtype and elements of each observation of a site."""
    recording = traindiff.open_recording(str(run))
    return [
        (seen.slot, seen.dtype, seen.shard.size)
        for rank in recording.ranks
        for step in recording.steps(rank)
        for seen in step.observations
        if (seen.path, seen.phase) == (path, phase)
    ]


def test_ranks_record_what_they_hold(tmp_path: Path) -> None:
    run_on_ranks(trained, 2, str(tmp_path / "run"), 3, {"zero": PARTITION_ALL})

    recording = traindiff.open_recording(str(tmp_path / "run"))
    assert recording.rank_content(0)["parameters"]["blocks.0.up.weight"]["shape"] == [64, 16]
    assert {size for _, _, size in observed(tmp_path / "run", path="blocks.0.up.weight", phase="param")} == {512}
    assert recording.run["engine"]["zero_stage"] == 3


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
    assert "The candidate clips gradients to a norm of 1; the baseline does not clip." in first.says
    assert 'DeepSpeed does so by default since 0.19.3: write "gradient_clipping": 0.0' in first.says
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
    assert "asks DeepSpeed for Adam, and it makes AdamW of that" in first.says


def scale_the_loss(engine: Any) -> None:
    engine.optimizer.override_loss_scale(1024.0)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_scale_is_recorded_and_gradients_are_unscaled(stage: int, reference: Path, tmp_path: Path) -> None:
    how = {"after_making": scale_the_loss, "zero": PARTITION_ALL if stage == 3 else {}}
    run_on_ranks(trained, 2, str(tmp_path / "run"), stage, how)

    steps = traindiff.open_recording(str(tmp_path / "run")).steps(0)
    seen = [(one, summary) for step in steps for one, summary in zip(step.observations, step.summaries, strict=True)]
    assert {float(summary["sum"]) for one, summary in seen if one.path == "loss_scale"} == {1024.0}
    assert {one.phase for one, _ in seen if one.scaled} == {"loss", "backward"}
    assert {one.phase for one, _ in seen if not one.scaled} >= {"grad", "optimizer", "param"}
    comparison = traindiff.compare(reference, tmp_path / "run")
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
    assert first.says == "All gradients are 0.0009766 x the baseline's."  # 1 / 1024


def test_a_step_that_is_taken_before_the_first_is_found(tmp_path: Path) -> None:
    """Without ZeRO in bfloat16, DeepSpeed 0.19.6 steps once with gradients of zero when it makes the optimizer."""
    train_plain(str(tmp_path / "plain"), dtype=torch.bfloat16)
    run_on_ranks(trained, 2, str(tmp_path / "run"), 0, {"config": {"bf16": {"enabled": True}}})

    comparison = traindiff.compare(tmp_path / "plain", tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.kind, first.step, first.slot) == ("step-count", 0, "step"), str(comparison)
