"""FullyShardedDataParallel, whose parameters are ranges of flat ones, against one process on the gathered batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import traindiff
from tests.engines.training import Block, Model, train
from traindiff.comparison.pairing import run_steps
from traindiff.comparison.replay import replayed
from traindiff.recording import open_recording
from traindiff.sessions.ranks import run_on_ranks

EVERYTHING = ("batch", "forward", "loss", "backward", "grad", "optimizer", "update", "param", "replay", "grad.micro")


def sharded(model: Model, *, strategy: str = "FULL_SHARD", use_orig_params: bool = True) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
    )


def train_everything(path: str, prepare=lambda model: model) -> None:
    train(path, prepare, observe=EVERYTHING)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    train_everything(path)
    return path


@pytest.mark.parametrize(
    ("world_size", "strategy", "use_orig_params"),
    [(2, "FULL_SHARD", True), (4, "FULL_SHARD", False), (2, "SHARD_GRAD_OP", True)],
)
def test_it_is_equivalent_to_one_process(
    world_size: int, strategy: str, use_orig_params: bool, reference: Path, tmp_path: Path
) -> None:
    prepare = partial(sharded, strategy=strategy, use_orig_params=use_orig_params)
    run_on_ranks(train_everything, world_size, str(tmp_path / "run"), prepare)

    comparison = traindiff.compare(reference, tmp_path / "run")

    assert comparison.verdict == "equivalent", str(comparison)
    assert not any(comparison.unaligned)
    compared = {(row.phase, row.stage) for row in comparison.differences}
    assert compared >= {
        ("forward", ""), ("backward", ""), ("grad", "micro"), ("grad", ""), ("optimizer", ""), ("update", ""),
        ("param", "before"),
    }  # fmt: skip
    run = open_recording(str(tmp_path / "run"))
    whole = open_recording(str(reference)).rank_content(0)["parameters"]
    for rank in run.ranks:
        assert run.rank_content(rank)["parameters"] == whole


def test_the_optimizer_is_replayed_on_what_each_rank_holds(tmp_path: Path) -> None:
    prepare = partial(sharded, use_orig_params=False)
    run_on_ranks(train_everything, 2, str(tmp_path / "run"), prepare)

    step = next(run_steps(open_recording(str(tmp_path / "run"))))
    replays = list(replayed(step.table))

    assert {one.key.path for one in replays} == {name for name, _ in Model().named_parameters()}
    assert all(one.worst < 1.0 for one in replays)
    assert {len(one.residual.parts) for one in replays} == {1, 2}
