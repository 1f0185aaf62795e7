"""Steps that repeat the one before in both runs are aligned only if they are judged, and the verdict is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import traindiff
from traindiff.analyse.align.two_runs import RepeatedStep, TwoRuns
from traindiff.analyse.compare import Comparison

STEPS = 12


class Branches(nn.Module):
    """Has a parameter that no loss reaches, a frozen one, buffers, and a branch that is taken in every fourth step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head, self.other, self.unused = nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(2, 2)
        self.body[0].bias.requires_grad_(False)
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.body(rows)
        self.calls += 1
        return self.other(hidden) if self.calls % 4 == 0 else self.head(hidden)


def _one(path: Path, fault: Callable[[nn.Module, int], None]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(STEPS):
            model(torch.randn(16, 8)).pow(3).mean().backward()
            fault(model, step)
            optimizer.step()
            optimizer.zero_grad()


def _branches(path: Path, fault: Callable[[nn.Module, int], None]) -> None:
    model = Branches()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1e-2, momentum=0.9)
    with traindiff.record(path, model, optimizer):
        for step in range(2 * STEPS):
            model(torch.randn(16, 8)).pow(2).mean().backward()
            fault(model, step - STEPS)  # plans are made late, as the branch comes between
            optimizer.step()
            optimizer.zero_grad()


def _two_optimizers(path: Path, fault: Callable[[nn.Module, int], None]) -> None:
    model = nn.ModuleDict({"first": nn.Linear(8, 16), "second": nn.Linear(16, 4)})
    first = torch.optim.AdamW(model["first"].parameters(), lr=1e-2)
    second = torch.optim.SGD(model["second"].parameters(), lr=1e-2)
    with traindiff.record(path, model, [first, second]):
        for step in range(STEPS):
            model["second"](model["first"](torch.randn(16, 8))).pow(2).mean().backward()
            fault(model, step)
            first.step()
            if step > STEPS // 2:
                second.step()
            model.zero_grad()


def _none(_model: nn.Module, _step: int) -> None:
    """Nothing is wrong."""


def _last_gradient(model: nn.Module, step: int) -> None:
    if step >= STEPS - 2:
        next(one for one in model.parameters() if one.grad is not None).grad.mul_(1.5)  # type: ignore[union-attr]


def _parameter(model: nn.Module, step: int) -> None:
    """A parameter that no step holds is changed while all else is the same."""
    if step == STEPS - 3:
        with torch.no_grad():
            [*model.parameters()][-1].add_(0.5)


def _buffer(model: nn.Module, step: int) -> None:
    if step == STEPS - 3:
        for one in model.buffers():
            one.add_(1)


@pytest.mark.parametrize("fault", [_none, _last_gradient, _parameter, _buffer])
@pytest.mark.parametrize("training", [_one, _branches, _two_optimizers])
def test_what_is_said_is_that_of_aligning_each_step(
    training: Callable[[Path, Callable[[nn.Module, int], None]], None],
    fault: Callable[[nn.Module, int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [tmp_path / "right", tmp_path / "wrong"]
    for path, wrong in zip(runs, (_none, fault), strict=True):
        torch.manual_seed(0)
        training(path, wrong)
    repeated: list[bool] = []
    again = TwoRuns.again

    def compared(*, repeats: bool) -> Comparison:
        def noted(self: TwoRuns, *given: Any) -> RepeatedStep | None:
            found = again(self, *given) if repeats else None
            repeated.append(found is not None)
            return found

        monkeypatch.setattr(TwoRuns, "again", noted)
        return traindiff.compare(*runs)

    found = compared(repeats=True)
    assert any(repeated)
    repeated.clear()
    one_by_one = compared(repeats=False)

    assert not any(repeated)
    assert repr(found) == repr(one_by_one)
    assert found.to_json() == one_by_one.to_json()
