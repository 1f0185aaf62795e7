"""Data-parallel engines against one process on the gathered batch."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import traindiff
from tests.examples.readme import block as shown_block
from tests.examples.symptom_pages import ROOT, shown
from tests.observe.sharding.training import Model, train
from tests.on_ranks import RanksError, run_on_ranks
from traindiff.cli.commands import app


def in_ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def fully_sharded(model: Model, **settings: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    train(path)
    return path


@pytest.mark.parametrize(
    ("world_size", "engine"),
    [
        (2, in_ddp),
        (4, fully_sharded),
        pytest.param(4, in_ddp, marks=pytest.mark.release),
        pytest.param(2, fully_sharded, marks=pytest.mark.release),
    ],
)
def test_an_engine_is_equivalent_to_one_process(engine, world_size: int, reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train, world_size, str(tmp_path / "run"), engine)

    comparison = traindiff.compare(reference, tmp_path / "run")

    assert comparison.verdict == "equivalent", str(comparison)
    assert not any(comparison.unaligned)


def drift(model: nn.Module) -> None:
    """On rank 1 a bias is not what it was."""
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if name.endswith("blocks.1.up.bias")).grad.add_(1e-3)


def lose_one_all_reduce(model: Model) -> nn.Module:
    """One layer's gradient stays what the rank's own samples gave."""
    names = [name for name, _ in model.named_parameters() if name.startswith("blocks.0.down")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def sum_gradients(model: nn.Module) -> None:
    """Summed over ranks instead of averaged."""
    for parameter in model.parameters():
        parameter.grad *= torch.distributed.get_world_size()


def train_drifting(path: str) -> None:
    train(path, in_ddp, before_step=drift)


def train_summed(path: str) -> None:
    train(path, in_ddp, before_step=sum_gradients)


def train_unscaled_loss(path: str) -> None:
    train(path, in_ddp, loss_scale=0.5)


def test_a_rank_that_drifts_is_named(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train_drifting, 4, str(tmp_path / "run"))
    first = traindiff.compare(tmp_path / "run", tmp_path / "run").first_divergence
    assert first is None  # both alike

    comparison = traindiff.compare(reference, tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.kind, first.rank, first.step, first.phase, first.path) == (
        "ranks-disagree", 1, 0, "grad", "blocks.1.up.bias",
    ), str(comparison)  # fmt: skip
    assert "rank 1 holds another copy of blocks.1.up.bias grad than ranks 0, 2 and 3" in first.message

    checked = CliRunner().invoke(app, ["check", str(tmp_path / "run"), "--top", "0"]).stdout
    assert [*shown(checked)] == shown_block(ROOT / "README.md", "traindiff check runs/ddp --top 0").splitlines()


def test_a_gradient_that_is_left_out_of_the_all_reduce_differs_from_that_of_one_process(
    reference: Path, tmp_path: Path
) -> None:
    """DistributedDataParallel was told to leave it out, so the run by itself may be as it is meant to be."""
    run_on_ranks(train, 2, str(tmp_path / "run"), lose_one_all_reduce)

    comparison = traindiff.compare(reference, tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.kind, first.step, first.phase, first.path) == (
        "value", 0, "grad", "blocks.0.down.weight",
    ), str(comparison)  # fmt: skip
    assert any("DistributedDataParallel ignores them" in note for note in traindiff.check(tmp_path / "run").notes)


def test_gradients_that_are_summed_instead_of_averaged(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train_summed, 2, str(tmp_path / "run"))

    comparison = traindiff.compare(reference, tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.kind, first.phase) == ("scale", "grad"), str(comparison)
    assert "2 x the baseline's (= world size 2: summed over ranks instead of averaged?)" in first.message


def test_a_loss_that_is_divided_once_too_often(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train_unscaled_loss, 2, str(tmp_path / "run"))

    comparison = traindiff.compare(reference, tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.kind, first.step, first.phase) == ("scale", 0, "loss"), str(comparison)
    assert "0.5 x" in first.message


def die_on_rank_1(_model: nn.Module) -> None:
    if torch.distributed.get_rank() == 1 and die_on_rank_1.__dict__.setdefault("steps", 0) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    die_on_rank_1.__dict__["steps"] = die_on_rank_1.__dict__.get("steps", 0) + 1


def train_until_one_dies(path: str) -> None:
    train(path, in_ddp, before_step=die_on_rank_1)


def test_a_rank_that_left_no_recording_is_named_and_the_rest_is_compared(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train, 2, str(tmp_path / "run"), in_ddp)
    shutil.rmtree(tmp_path / "run" / "rank-00001")

    comparison = traindiff.compare(reference, tmp_path / "run")

    assert comparison.verdict == "incomplete", str(comparison)
    assert any("rank 1 left no recording" in note for note in comparison.notes)
    assert any("rank 1 did not record this step" in note for note in comparison.notes)
    assert {row.phase for row in comparison.differences} >= {"grad", "update", "param"}


def test_a_rank_that_is_killed_is_compared_as_far_as_it_came(reference: Path, tmp_path: Path) -> None:
    with pytest.raises(RanksError):
        run_on_ranks(train_until_one_dies, 2, str(tmp_path / "run"), timeout_seconds=30)

    comparison = traindiff.compare(reference, tmp_path / "run")

    assert comparison.verdict == "incomplete", str(comparison)
    assert not comparison.findings
    assert {0, 1} <= set(comparison.steps)
