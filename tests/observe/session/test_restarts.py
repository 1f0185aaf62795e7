"""A training that its launcher starts again, with as many ranks or with fewer: each start has a recording."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.observe.sharding.training import BATCH, LENGTH, VOCABULARY, Model, adamw, rank_and_size
from tests.on_ranks import RanksError, run_on_ranks
from traindiff.storage import open_recording

STEPS, LOST = 6, 3
"""All steps, and the one in which the first start is lost."""


def train(directory: str, *, loses_rank: bool = False) -> None:
    """Train up to the last step, from the checkpoint if there is one; a rank may be lost on the first start."""
    torch.manual_seed(0)
    checkpoint = Path(directory, "checkpoint.pt")
    rank, size = rank_and_size()
    model = Model()
    optimizer = adamw(model.parameters())
    first = 0
    if checkpoint.exists():
        saved: Any = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    wrapped: nn.Module = DistributedDataParallel(model) if size > 1 else model
    with traindiff.record(f"{directory}/run", wrapped, optimizer, first_step=first):
        for step in range(first, STEPS):
            if loses_rank and step == LOST and rank == size - 1 and not first:
                os._exit(9)
            data = torch.Generator().manual_seed(step)
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data).chunk(size)[rank]
            logits = wrapped(tokens[:, :-1])
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step < LOST:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)


def _loses_rank(directory: str) -> None:
    train(directory, loses_rank=True)


@pytest.mark.parametrize("size", [1, 2])
def test_a_restart_is_recorded_beside_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    with pytest.raises(RanksError, match="Rank 1"):
        run_on_ranks(_loses_rank, 2, str(tmp_path))
    (tmp_path / "alone").mkdir()
    train(str(tmp_path / "alone"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # as torchrun says it
    run_on_ranks(train, size, str(tmp_path))

    first, second = (open_recording(str(tmp_path / name)) for name in ("run", "run-restart-1"))
    assert (first.world_size, first.status(1).ending != "closed") == (2, True)
    assert (second.world_size, second.status(0).ending) == (size, "closed")
    before = traindiff.compare(tmp_path / "alone" / "run", first.path)
    assert before.verdict != "diverged", str(before)
    after = traindiff.compare(tmp_path / "alone" / "run", second.path)
    assert after.verdict == "equivalent", str(after)
    assert traindiff.check(second.path).verdict == "healthy"
