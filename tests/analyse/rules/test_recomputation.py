"""Checkpointed blocks whose second forward pass is another one than the first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import traindiff
from traindiff.analyse.check import Verdict


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.dropout, self.narrow = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(self.dropout(torch.relu(self.wide(x))))
        return y


class Blocks(nn.Module):
    def __init__(self, *, reentrant: bool, keeps_random_state: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 8), nn.ModuleList(Block() for _ in range(2))
        self.how = {"use_reentrant": reentrant, "preserve_rng_state": keeps_random_state}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.how)
        return x


def checked(path: Path, *, reentrant: bool, keeps_random_state: bool) -> Verdict:
    torch.manual_seed(0)
    model = Blocks(reentrant=reentrant, keeps_random_state=keeps_random_state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        for _ in range(2):
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return traindiff.check(path)


@pytest.mark.parametrize("reentrant", [True, False])
def test_other_dropout_masks_the_second_time_are_found(reentrant: bool, tmp_path: Path) -> None:
    found = checked(tmp_path / "run", reentrant=reentrant, keeps_random_state=False)

    first = found.findings[0]
    assert found.verdict == "unhealthy"
    assert (first.step, first.kind, first.path) == (0, "recomputed", "blocks.1.dropout")
    assert "preserve_rng_state=False?" in first.message


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_same_masks_are_no_finding(reentrant: bool, tmp_path: Path) -> None:
    found = checked(tmp_path / "run", reentrant=reentrant, keeps_random_state=True)

    assert (found.verdict, found.findings) == ("healthy", ())
