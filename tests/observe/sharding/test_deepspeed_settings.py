"""DeepSpeed's ZeRO with other settings: dtypes, optimizers, offloading, accumulation, ways of partitioning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import traindiff
from tests.observe.sharding.deepspeed_training import (
    NEEDS_DEEPSPEED,
    PARTITION_ALL,
    compared,
    train_plain,
    trained,
    trained_and_counted,
)
from tests.observe.sharding.training import Model
from tests.on_ranks import run_on_ranks
from traindiff.analyse.merge.run_steps import run_steps
from traindiff.analyse.rules.replay import replayed
from traindiff.storage import open_recording

pytestmark = [NEEDS_DEEPSPEED, pytest.mark.deepspeed, pytest.mark.timeout(900)]

COMPILING_SECONDS = 600.0
"""How long a run may take that compiles an optimizer of DeepSpeed's first."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "run"
    train_plain(str(path))
    return path


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
    "0, DeepSpeed's own Adam": (0, OWN_ADAMW),
    "1, DeepSpeed's own Adam": (1, OWN_ADAMW),
    "3, DeepSpeed's own Adam": (3, {**OWN_ADAMW, "zero": PARTITION_ALL}),
    "2, DeepSpeed's own Adam, offloaded": (2, {**OWN_ADAMW, "zero": OFFLOADED["zero"]}),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_ways_of_recording_and_partitioning_are_equivalent(settings: str, reference: Path, tmp_path: Path) -> None:
    stage, how = SETTINGS[settings]
    run_on_ranks(trained, 2, str(tmp_path / "run"), stage, how, timeout_seconds=COMPILING_SECONDS)

    comparison = compared(reference, tmp_path / "run")
    assert comparison.verdict == "equivalent", str(comparison)
    replays = [one for step in run_steps(open_recording(str(tmp_path / "run"))) for one in replayed(step.table)]
    assert {one.key.path for one in replays} == {name for name, _ in Model().named_parameters()}
    assert max(one.worst for one in replays) < 1.0


@pytest.mark.parametrize(("stage", "world_size"), [(1, 2), (2, 4), (3, 4)])
def test_accumulated_micro_batches_are_equivalent(stage: int, world_size: int, tmp_path: Path) -> None:
    train_plain(str(tmp_path / "plain"), micro_batches=2)
    how = {"micro_batches": 2, "zero": PARTITION_ALL if stage == 3 else {}}
    run_on_ranks(trained, world_size, str(tmp_path / "run"), stage, how)

    comparison = compared(tmp_path / "plain", tmp_path / "run")
    assert comparison.verdict == "equivalent", str(comparison)


@pytest.mark.parametrize("stage", [0, 2])
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
    steps = traindiff.open_recording(str(tmp_path / "run")).steps(0)
    seen = [one for step in steps for one in step.observations if one.path == "blocks.0.up.weight"]
    assert {one.slot: one.dtype for one in seen if one.phase == "param"} == {"value": "bfloat16", "master": "float32"}
