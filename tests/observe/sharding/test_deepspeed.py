"""DeepSpeed's ZeRO stages against one process on the gathered batch, and against each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import traindiff
from tests.observe.sharding.deepspeed_training import (
    NEEDS_DEEPSPEED,
    PARTITION_ALL,
    compared,
    train_plain,
    trained,
    trained_and_counted,
)
from tests.on_ranks import run_on_ranks

pytestmark = NEEDS_DEEPSPEED
release = partial(pytest.param, marks=pytest.mark.release)


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


@pytest.mark.parametrize("stage", [release(0), release(1), release(2), 3])
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


@pytest.mark.parametrize("stage", [1, release(3)])
def test_recording_changes_no_bit_and_calls_no_collective(stage: int, tmp_path: Path) -> None:
    how = {"micro_batches": 2, "zero": PARTITION_ALL if stage == 3 else {}}
    plain = run_on_ranks(trained_and_counted, 2, None, stage, how)
    recorded = run_on_ranks(trained_and_counted, 2, str(tmp_path / "run"), stage, how)

    assert recorded == plain
    assert plain[0][1], "no collective was counted"


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
