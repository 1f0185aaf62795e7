"""Ranks that should compute the same and do not: what follows from that is no further finding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.on_ranks import run_on_ranks
from traindiff.analyse.compare import Comparison

AT, STEPS = 2, 5
CHANGES = ["none", "limit", "rate"]


def train(directory: str) -> None:
    rank = torch.distributed.get_rank()
    for change in CHANGES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 3))
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        drawn = torch.Generator().manual_seed(1)
        with traindiff.record(Path(directory, change), wrapped, optimizer):
            for step in range(STEPS):
                inputs, labels = torch.randn(8, 6, generator=drawn), torch.randint(0, 3, (8,), generator=drawn)
                is_wrong = rank == 1 and step >= AT
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(inputs[rank::2]), labels[rank::2]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.02 if change == "limit" and is_wrong else 0.05)
                if change == "rate" and is_wrong:
                    optimizer.param_groups[0]["lr"] = 0.05
                optimizer.step()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    run_on_ranks(train, 2, str(directory))
    return directory


def compared(runs: Path, change: str) -> Comparison:
    return traindiff.compare(runs / "none", runs / change)


@pytest.mark.parametrize(("change", "phase"), [("limit", "grad"), ("rate", "optimizer")])
def test_what_follows_from_ranks_that_part_is_no_further_finding(runs: Path, change: str, phase: str) -> None:
    result = compared(runs, change)

    first = result.findings[0]
    assert result.verdict == "diverged"
    assert (first.step, first.phase) == (AT, phase)
    assert {one.step for one in result.findings} == {AT}, str(result)
    forward = [row for row in result.differences if row.phase == "forward"]
    assert {row.word for row in forward} == {"follows"}


def test_the_limit_of_each_rank_is_named(runs: Path) -> None:
    clipping = next(one for one in compared(runs, "limit").findings if one.kind == "clipping")

    assert clipping.message == (
        "The baseline clips gradients to a norm of 0.05, the candidate clips gradients to a norm of 0.05 on rank 0 and "
        "0.02 on rank 1."
    )
