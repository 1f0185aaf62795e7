"""Buffers that start with other values, and counters, beside the number that they change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import traindiff
from traindiff.analyse.compare.verdict import Comparison


class Picks(nn.Module):
    """A module whose buffers choose, and scale, what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.register_buffer("order", torch.arange(8))
        self.register_buffer("angles", torch.linspace(0.5, 2.0, 8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.counts_by = 1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.counts_by
        picked: Tensor = self.last(self.first(x)[:, self.order] * self.angles)
        return picked


def recorded(path: Path, model: Picks, *, before_2: Callable[[Picks], object] = repr) -> Path:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            if step == 2:
                before_2(model)
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def compared(where: Path, **buffers: Tensor) -> Comparison:
    torch.manual_seed(0)
    baseline = recorded(where / "b", Picks())
    torch.manual_seed(0)
    other = Picks()
    for name, values in buffers.items():
        setattr(other, name, values)
    return traindiff.compare(baseline, recorded(where / "c", other))


@pytest.mark.parametrize(
    ("buffers", "told"),
    [
        ({"order": torch.arange(8).flip(0)}, "A buffer starts with other values: order."),
        ({"angles": torch.linspace(0.5, 2.1, 8)}, "A buffer starts with other values: angles."),
        (
            {"order": torch.arange(8).flip(0), "angles": torch.linspace(0.5, 2.1, 8)},
            "Buffers start with other values: order, angles.",
        ),
    ],
)
def test_a_buffer_that_starts_with_other_values_is_named_where_it_shows(
    buffers: dict[str, Tensor], told: str, tmp_path: Path
) -> None:
    first = compared(tmp_path, **buffers).first_divergence

    assert first is not None
    assert (first.step, first.phase, first.path) == (0, "forward", "last")
    assert told in first.message


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: model.angles.mul_(1.01), " changed a buffer since the step before: angles."),
        (lambda model: model.order.copy_(model.order.flip(0)), " changed a buffer since the step before: order."),
        (lambda model: model.angles.mul_(1 + 1e-7), ""),
        (repr, ""),
    ],
    ids=["scaled", "integers", "rounded", "none"],
)
def test_a_buffer_that_only_the_candidate_changes_is_named_where_it_shows(
    change: Callable[[Picks], object], told: str, tmp_path: Path
) -> None:
    runs = []
    for name, between in (("b", repr), ("c", change)):
        torch.manual_seed(0)
        runs.append(recorded(tmp_path / name, Picks(), before_2=between))
    found = traindiff.compare(*runs)

    if not told:
        assert found.verdict in ("identical", "equivalent")
        return
    first = found.first_divergence
    assert first is not None
    assert (first.step, first.phase, first.path) == (2, "forward", "last")
    assert first.message.endswith(f"The candidate alone has{told}")
    assert "calls" not in first.message  # both runs count


def test_a_table_that_is_rounded_otherwise_is_not_named(tmp_path: Path) -> None:
    found = compared(tmp_path, angles=torch.linspace(0.5, 2.0, 8, dtype=torch.float64).float() * (1 + 1e-7))

    assert (found.verdict, found.findings) == ("equivalent", ())


def test_a_counter_that_differs_is_not_said_to_be_a_label(tmp_path: Path) -> None:
    torch.manual_seed(0)
    baseline = recorded(tmp_path / "b", Picks())
    torch.manual_seed(0)
    other = Picks()
    other.counts_by = 2
    first = traindiff.compare(baseline, recorded(tmp_path / "c", other)).first_divergence

    assert first is not None
    assert (first.path, first.slot) == ("calls", "buffer")
    assert "labels" not in first.message
