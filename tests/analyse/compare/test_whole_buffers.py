"""Buffers of integers: they are recorded when they were written, and hold what they held until then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import traindiff


class Counting(nn.Module):
    """A linear layer beside a count that the loop writes, and one that nothing writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("positions", torch.arange(4))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows)


def train(path: Path, *, begins_at: int = 0, every: int = 1, stops_at: int = 5) -> Path:
    """Five steps, each of which is counted after the optimizer has stepped, up to a step."""
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(5, 4, 3)
    with traindiff.record(path, model, optimizer, every=every, steps=f"{begins_at}-"):
        for step in range(5):
            model(batches[step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step < stops_at and isinstance(model.count, Tensor):
                model.count += 1
    return path


@pytest.mark.parametrize("other", [{"begins_at": 3}, {"every": 2}, {"begins_at": 3, "every": 4}])
def test_a_buffer_that_was_written_between_steps_is_known_to_a_run_that_recorded_fewer_steps(
    tmp_path: Path, other: dict[str, int]
) -> None:
    baseline, candidate = train(tmp_path / "baseline"), train(tmp_path / "candidate", **other)
    for one, two in ((baseline, candidate), (candidate, baseline)):
        unaligned = traindiff.compare(one, two).unaligned
        assert not [site for side in unaligned for site in side if site.path in ("count", "positions")]


def test_a_buffer_that_one_run_stops_writing_is_where_they_differ(tmp_path: Path) -> None:
    baseline, candidate = train(tmp_path / "baseline"), train(tmp_path / "candidate", stops_at=2)
    found = traindiff.compare(baseline, candidate)
    assert found.verdict == "diverged"
    first = found.first_divergence
    assert first is not None
    assert (first.step, first.phase, first.path) == (3, "param", "count")
