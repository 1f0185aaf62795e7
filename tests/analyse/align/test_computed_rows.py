"""Experts that one run computes for all rows, and the other for the rows that a router chose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

import traindiff

Combine = Callable[["Mixture", Tensor, Tensor], Tensor]
"""What the experts make of hidden states, with the weight of each expert for each row."""


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(gelu(self.wide(x)))
        return y


class Mixture(nn.Module):
    """The two best of four experts for each row."""

    def __init__(self, combine: Combine) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(6, 12), nn.Linear(12, 4, bias=False), nn.Linear(12, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        best, chosen = self.router(x).softmax(-1).topk(2, -1)
        weights = torch.zeros(len(x), 4).scatter(1, chosen, best / best.sum(-1, keepdim=True))
        y: Tensor = self.last(x + self.combine(self, x, weights))
        return y


def of_chosen_rows(model: Mixture, x: Tensor, weights: Tensor) -> Tensor:
    whole = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        rows = weights[:, number].nonzero().squeeze(1)
        if len(rows):
            whole = whole.index_add(0, rows, expert(x[rows]) * weights[rows, number : number + 1])
    return whole


def of_all_rows(model: Mixture, x: Tensor, weights: Tensor) -> Tensor:
    parts = [expert(x) * weights[:, number : number + 1] for number, expert in enumerate(model.experts)]
    return torch.stack(parts).sum(0)


def with_a_wrong_weight(model: Mixture, x: Tensor, weights: Tensor) -> Tensor:
    return of_all_rows(model, x, weights * torch.tensor([1.0, 1.0, 1.05, 1.0]))


def without_the_last_row(model: Mixture, x: Tensor, weights: Tensor) -> Tensor:
    kept = [expert(x[:-1]) * weights[:-1, number : number + 1] for number, expert in enumerate(model.experts)]
    return nn.functional.pad(torch.stack(kept).sum(0), (0, 0, 0, 1))


def trained(path: Path, combine: Combine) -> Path:
    torch.manual_seed(0)
    model = Mixture(combine)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(24, 6, generator=generator), torch.randint(3, (24,), generator=generator)
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("ways", [(of_chosen_rows, of_all_rows), (of_all_rows, of_chosen_rows)])
def test_rows_that_count_for_nothing_may_be_computed(ways: tuple[Combine, Combine], tmp_path: Path) -> None:
    found = traindiff.compare(*(trained(tmp_path / way.__name__, way) for way in ways))

    assert (found.verdict, found.findings) == ("equivalent", ())
    assert any("for all samples, the other for rows that were chosen" in note for note in found.notes)


def test_a_fault_is_found_where_the_experts_are_joined(tmp_path: Path) -> None:
    baseline = trained(tmp_path / "b", of_chosen_rows)
    first = traindiff.compare(baseline, trained(tmp_path / "c", with_a_wrong_weight)).first_divergence

    assert first is not None
    assert (first.step, first.phase, first.path, first.kind != "shape") == (0, "forward", "last", True)


def test_a_row_that_is_lost_is_found(tmp_path: Path) -> None:
    baseline = trained(tmp_path / "b", of_all_rows)

    assert traindiff.compare(baseline, trained(tmp_path / "c", without_the_last_row)).verdict == "diverged"


class Crops(nn.Module):
    """Joins crops of one size into one batch, or not."""

    def __init__(self, *, joins: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)
        self.joins = joins

    def forward(self, crops: list[Tensor]) -> Tensor:
        parts = [torch.cat(crops[:2]), torch.cat(crops[2:])] if self.joins else crops
        return torch.cat([self.head(gelu(self.body(part)).mean((2, 3))) for part in parts])


def cropped(path: Path, *, joins: bool, scaled: float = 1.0) -> Path:
    torch.manual_seed(0)
    model = Crops(joins=joins)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            crops = [torch.randn(5, 3, size, size, generator=generator) for size in (8, 8, 4, 4, 4)]
            model(crops).mul(scaled).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("joins", [True, False])
def test_crops_that_one_run_joins_are_no_rows_that_were_chosen(joins: bool, tmp_path: Path) -> None:
    found = traindiff.compare(cropped(tmp_path / "b", joins=joins), cropped(tmp_path / "c", joins=not joins))

    assert (found.verdict, found.findings) == ("equivalent", ())
    wrong = cropped(tmp_path / "d", joins=not joins, scaled=1.01)
    assert traindiff.compare(tmp_path / "b", wrong).verdict == "diverged"
