"""A rank that calls the optimizer once more than the others, or once less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.on_ranks import run_on_ranks

AT = 2


def train(path: str, calls: int) -> None:
    """Data-parallel on all ranks. In one step, rank 1 calls the optimizer `calls` times."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with traindiff.record(path, wrapped := DistributedDataParallel(model), optimizer):
        for step in range(4):
            data = torch.Generator().manual_seed(step)
            x, y = torch.randn(8, 6, generator=data), torch.randint(4, (8,), generator=data)
            cross_entropy(wrapped(x.chunk(size)[rank]), y.chunk(size)[rank]).backward()
            for _ in range(calls if (rank, step) == (1, AT) else 1):
                optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("right") / "run")
    run_on_ranks(train, 2, path, 1)
    return path


def test_a_rank_that_steps_once_more_is_named(right: str, tmp_path: Path) -> None:
    wrong = str(tmp_path / "wrong")
    run_on_ranks(train, 2, wrong, 2)

    first = traindiff.check(wrong).findings[0]
    compared = traindiff.compare(right, wrong)

    told = (
        f"ank 1 calls the optimizer once more than the other ranks: its step {AT + 1} has no forward or backward pass"
    )
    assert (first.kind, first.step, first.rank) == ("rank-steps", AT + 1, 1)
    assert told in first.message
    assert (compared.verdict, compared.findings[0].kind, compared.findings[0].rank) == ("diverged", "rank-steps", 1)
    assert f"In the candidate, r{told}" in compared.findings[0].message


def test_ranks_that_step_together_keep_the_rule(right: str) -> None:
    assert traindiff.check(right, rules=["rank-steps"]).verdict == "healthy"
