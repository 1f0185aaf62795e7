"""What waits to be written has a bound, and what goes beyond it is written early, not dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import traindiff
from traindiff.observe.common import sink as pending
from traindiff.observe.common.writing import BackgroundWriter
from traindiff.storage import open_recording


def train(path: Path, *, detail: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer, detail=detail, strict=True):
        for _ in range(2):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def observed(path: Path) -> list[list[tuple[object, ...]]]:
    return [
        [(one.phase, one.path, one.slot, one.order, one.dtype) for one in step.observations]
        for step in open_recording(str(path)).steps(0)
    ]


@pytest.mark.parametrize("detail", ["summary", "tensors"])
def test_a_step_beyond_the_bound_is_written_in_parts_and_read_as_one(
    detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "whole", detail=detail)
    sizes: list[int] = []
    write_step = BackgroundWriter.write_step

    def counting(self: BackgroundWriter, observations: list[object], *rest: Any) -> None:
        sizes.append(len(observations))
        write_step(self, observations, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(BackgroundWriter, "write_step", counting)
    monkeypatch.setattr(pending, "MOST_BYTES", 10_000)
    train(tmp_path / "parts", detail=detail)

    assert len(sizes) > 4
    assert max(sizes) <= 7  # an observation counts as 1.8 kB
    assert observed(tmp_path / "parts") == observed(tmp_path / "whole")
    assert open_recording(str(tmp_path / "parts")).status(0).ending == "closed"
