"""Steps that have the same bits in both runs wait, and the verdict is the one of judging each of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import traindiff
from traindiff.analyse.compare import Comparison
from traindiff.analyse.compare.same_so_far import SameSoFar

STEPS = 12


def _recorded(path: Path, *, fault: str = "", at: int = 8) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(STEPS):
            outputs = model(torch.randn(16, 8))
            loss = outputs.pow(3).mean() * (float("nan") if fault == "nan" and step == at else 1.0)
            loss.backward()
            if fault == "gradient" and step == at:
                model[0].weight.grad.mul_(1.5)
            if fault == "lost" and step >= at:
                model[3].weight.grad.zero_()
            if fault == "rate" and step == at:
                optimizer.param_groups[0]["lr"] *= 2.0
            optimizer.step()
            optimizer.zero_grad()
    return str(path)


def _compared(baseline: str, candidate: str, monkeypatch: pytest.MonkeyPatch, *, wait: bool) -> tuple[Comparison, int]:
    """The comparison, and how many steps waited."""
    waited = []
    original = SameSoFar.waits

    def waits(self: SameSoFar, *given: object) -> bool:
        waited.append(wait and original(self, *given))  # type: ignore[arg-type]
        return waited[-1]

    with monkeypatch.context() as patched:
        patched.setattr(SameSoFar, "waits", waits)
        return traindiff.compare(baseline, candidate), sum(waited)


@pytest.mark.parametrize("fault", ["", "gradient", "lost", "rate", "nan"])
@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_said_does_not_depend_on_waiting(
    fault: str, swapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [_recorded(tmp_path / "right"), _recorded(tmp_path / "wrong", fault=fault)]
    baseline, candidate = runs[::-1] if swapped else runs

    found, num_waited = _compared(baseline, candidate, monkeypatch, wait=True)
    at_once, num_at_once = _compared(baseline, candidate, monkeypatch, wait=False)

    assert (num_waited > 1, num_at_once) == (True, 0)
    assert repr(replace(found, history=None)) == repr(replace(at_once, history=None))
    assert found.to_json() == at_once.to_json()
    assert (found.verdict == "identical") == (fault == "")


class _Fitted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(x)[0][:, -1])


def _fitted(path: Path, *, rounded: bool = False) -> str:
    torch.manual_seed(0)
    model, inputs, targets = _Fitted(), torch.randn(4, 3, 4), torch.randn(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(60):
            nn.functional.mse_loss(model(inputs), targets).backward()
            if rounded and step == 50:
                model.out.weight.grad.mul_(1.0 + 2e-7)
            optimizer.step()
            optimizer.zero_grad()
    return str(path)


def test_floors_near_a_minimum_know_the_steps_that_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _fitted(tmp_path / "one"), _fitted(tmp_path / "rounded", rounded=True)

    found, num_waited = _compared(*runs, monkeypatch, wait=True)
    at_once, _ = _compared(*runs, monkeypatch, wait=False)

    assert found.verdict == "equivalent"
    assert num_waited > 40
    assert found.to_json() == at_once.to_json()


def test_a_comparison_with_a_history_judges_each_step(tmp_path: Path) -> None:
    runs = [_recorded(tmp_path / "one"), _recorded(tmp_path / "other")]

    found = traindiff.compare(*runs, history=True)

    assert found.verdict == "identical"
    assert {row.num_identical_steps for row in found.differences if row.phase == "forward"} == {STEPS}
    assert traindiff.compare(*runs).to_json() == found.to_json()
