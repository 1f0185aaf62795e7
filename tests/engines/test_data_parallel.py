"""Data-parallel engines against one process on the gathered batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.engines.training import Model, train
from traindiff.sessions.ranks import run_on_ranks


def in_ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def fully_sharded(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    train(path)
    return path


@pytest.mark.parametrize("engine", [in_ddp, fully_sharded])
@pytest.mark.parametrize("world_size", [2, 4])
def test_an_engine_is_equivalent_to_one_process(engine, world_size: int, reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train, world_size, str(tmp_path / "run"), engine)

    comparison = traindiff.compare(reference, tmp_path / "run")

    assert comparison.verdict == "equivalent", str(comparison)
    assert not any(comparison.unaligned)
