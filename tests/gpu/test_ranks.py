"""DistributedDataParallel and FSDP2 on one rank for each GPU, over NCCL, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.gpu.training import used_device
from tests.observe.sharding.training import BATCH, LENGTH, VOCABULARY, Model
from tests.on_ranks import run_on_ranks

pytestmark = pytest.mark.gpu


def train(path: str, engine: str = "") -> str:
    """Train on this rank's part of each batch; returns the backend that reduces."""
    device = used_device()
    torch.manual_seed(0)
    model = Model().to(device)
    wrapped = prepared(model, engine, device)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    rank, size = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    data = torch.Generator().manual_seed(1)
    with traindiff.record(path, wrapped, optimizer, strict=True):
        for _ in range(3):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data).chunk(size)[rank].to(device)
            loss = functional.cross_entropy(wrapped(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if not distributed.is_initialized():
        return ""
    backend = torch.distributed.distributed_c10d._get_default_group()._get_backend(device)
    return type(backend).__name__


def prepared(model: Model, engine: str, device: torch.device) -> nn.Module:
    if engine == "ddp":
        return DistributedDataParallel(model)
    if engine == "fsdp2":
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_an_engine_on_all_gpus_is_equivalent_to_one_process(engine: str, device: torch.device, tmp_path: Path) -> None:
    num_ranks = torch.cuda.device_count() if device.type == "cuda" else 2
    train(str(tmp_path / "reference"))

    backends = run_on_ranks(train, num_ranks, str(tmp_path / "run"), engine)

    assert set(backends) == {"ProcessGroupNCCL" if device.type == "cuda" else "ProcessGroupGloo"}
    comparison = traindiff.compare(tmp_path / "reference", tmp_path / "run")
    assert comparison.verdict in ("identical", "equivalent"), str(comparison)
