"""DeepSpeed's ZeRO stages against one process on the gathered batch, and against each other."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import traindiff
from tests.engines.deepspeed_training import counted_collectives, train_engine, train_plain
from traindiff.sessions.ranks import run_on_ranks

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


SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "2, round robin": (2, {"zero": {"round_robin_gradients": True}}),
    "3, sub-groups": (3, {"zero": {**PARTITION_ALL, "sub_group_size": 500}}),
    "3, gathered": (3, {}),
    "1, the optimizer inside is given": (1, {"given": "inner", "root": "module"}),
    "3, no optimizer is given": (3, {"given": "none", "zero": PARTITION_ALL}),
    "2, no optimizer is given": (2, {"given": "none", "root": "module"}),
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
