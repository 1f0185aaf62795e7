"""Recording adds no collective: every process group counts as many with it as without it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional

import traindiff
from tests.observe.sharding.prepared import in_ddp, in_fsdp2, in_tensor_parallel
from tests.observe.sharding.training import LENGTH, VOCABULARY, Model
from tests.on_ranks import run_on_ranks


def in_fsdp1(model: Model) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


ENGINES = {"ddp": in_ddp, "fsdp1": in_fsdp1, "fsdp2": in_fsdp2, "tensor parallel": in_tensor_parallel}


def collectives_of(engine: str, path: str | None) -> int:
    """How many collectives three steps take, whoever calls them: Python, autograd, or the engine's own threads."""
    torch.manual_seed(0)
    model = ENGINES[engine](Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = sum(map(count, distributed.distributed_c10d._world.pg_map))
    with nullcontext() if path is None else traindiff.record(path, model, optimizer, strict=True):
        for step in range(3):
            tokens = torch.full((2, LENGTH), step)
            functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() % VOCABULARY).backward()
            optimizer.step()
            optimizer.zero_grad()
    return sum(map(count, distributed.distributed_c10d._world.pg_map)) - before


def count(group: distributed.ProcessGroup) -> int:
    return int(group._get_sequence_number_for_group())


def both(engine: str, path: str) -> list[int]:
    plain = collectives_of(engine, None)
    return [plain, collectives_of(engine, path)]


@pytest.mark.parametrize("engine", ENGINES)
def test_recording_adds_no_collective(engine: str, tmp_path: Path) -> None:
    for plain, recorded in run_on_ranks(both, 2, engine, str(tmp_path / "run")):
        assert plain >= 3
        assert recorded == plain
