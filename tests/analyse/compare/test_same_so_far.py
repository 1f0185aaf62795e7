"""Steps that have the same bits in both runs wait, and the verdict is the one of judging each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import traindiff
from tests.analyse.merge.test_step_table import part
from traindiff.analyse.compare import Comparison
from traindiff.analyse.compare.incremental import RunningComparison
from traindiff.analyse.compare.same_so_far import SameSoFar
from traindiff.analyse.compare.site_rows import SiteRows
from traindiff.analyse.merge.step_table import step_table
from traindiff.analyse.noise.run_floors import RunFloors

STEPS = 12


def _recorded(path: Path, *, fault: str = "", at: int = 8) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = torch.zeros(16, 8)
    with traindiff.record(path, model, optimizer):
        for step in range(STEPS):
            outputs = model(torch.randn(16, 8))
            loss = outputs.pow(3).mean() * (float("nan") if fault == "nan" and step == at else 1.0)
            loss.backward()
            if fault == "gradient" and step == at:
                model[0].weight.grad.mul_(1.5)
            if fault == "late" and step == at:
                model[0].weight.grad.copy_(before)
            before = model[0].weight.grad.clone()
            if fault == "lost" and step >= at:
                model[3].weight.grad.zero_()
            if fault == "rate" and step == at:
                optimizer.param_groups[0]["lr"] *= 2.0
            optimizer.step()
            optimizer.zero_grad()
    return str(path)


def _compared(baseline: str, candidate: str, monkeypatch: pytest.MonkeyPatch, *, wait: bool) -> tuple[Comparison, int]:
    """The comparison, and how many steps waited."""
    found, _, num_waited = _compared_with_floors(baseline, candidate, monkeypatch, wait=wait)
    return found, num_waited


def _compared_with_floors(
    baseline: str, candidate: str, monkeypatch: pytest.MonkeyPatch, *, wait: bool, steps: str | None = None
) -> tuple[Comparison, RunFloors, int]:
    """The comparison, what floors of later steps would follow from, and how many steps waited."""
    waited: list[bool] = []
    judged: list[RunFloors] = []
    original, result = SameSoFar.waits, RunningComparison.result

    def waits(self: SameSoFar, *given: object) -> bool:
        waited.append(wait and original(self, *given))  # type: ignore[arg-type]
        return waited[-1]

    def seen(self: RunningComparison) -> Comparison:
        found = result(self)
        judged.append(self._judge.run)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(SameSoFar, "waits", waits)
        patched.setattr(RunningComparison, "result", seen)
        return traindiff.compare(baseline, candidate, steps=steps), judged[-1], sum(waited)


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


def test_a_step_that_waits_comes_before_one_that_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = _recorded(tmp_path / "right"), _recorded(tmp_path / "wrong", fault="late")

    found, _, num_waited = _compared_with_floors(*runs, monkeypatch, wait=True, steps="0-6,8")
    at_once, *_ = _compared_with_floors(*runs, monkeypatch, wait=False, steps="0-6,8")

    assert num_waited
    assert found.first_divergence is not None
    assert found.first_divergence.kind == "late"
    assert found.to_json() == at_once.to_json()


def test_steps_of_two_optimizers_with_the_same_numbers_are_counted_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(8, 16), "second": nn.Linear(16, 4)})
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-2) for part in model.values()]
    with traindiff.record(tmp_path / "run", model, optimizers):
        for optimizer in optimizers:
            for _ in range(STEPS):
                model["second"](model["first"](torch.randn(16, 8))).pow(2).mean().backward()
                optimizer.step()
                model.zero_grad()
    run = str(tmp_path / "run")

    found, num_waited = _compared(run, run, monkeypatch, wait=True)
    at_once, _ = _compared(run, run, monkeypatch, wait=False)

    assert num_waited > 1
    assert found.to_json() == at_once.to_json()
    counted = {(row.path, row.num_steps, row.num_identical_steps) for row in found.differences if row.phase == "grad"}
    weights = {(f"{name}.{slot}", STEPS) for name in model for slot in ("weight", "bias")}
    assert counted == {(path, count, count) for path, count in (*weights, ("(all parameters)", 2 * STEPS))}


def test_steps_that_waited_are_counted_for_the_sites_of_their_optimizer_alone() -> None:
    rows = SiteRows()
    for optimizer in ("first", "second"):
        (entry,) = step_table([part(np.ones(4), site=("grad", "", f"{optimizer}.weight", "grad"), order=0)]).values()
        rows.optimizer = optimizer
        rows.note(entry, 9, (0.0, 1.0, 1.0), "identical", equal=True, other_bits=False)

    rows.count_again(9, 5)

    assert {row.path: row.num_steps for row in rows.rows()} == {"first.weight": 1, "second.weight": 6}


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


class _Recurrent(nn.Module):
    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.out = cell(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(x)[0][:, -1])


def _linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)).to(dtype)


def _trained(path: Path, model: nn.Module, between: Callable[[nn.Module, int], None], *, fault: bool) -> str:
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(STEPS):
            inputs, targets = torch.randn(4, 3, 4), torch.randn(4, 2)
            for factor in (1.0, 100.0 * (step % 5 == 2) + 0.1):
                output = model(inputs.to(next(model.parameters()).dtype)).float()
                (factor * nn.functional.mse_loss(output, targets)).backward()
            between(model, step)
            if fault and step == 9:
                for parameter in filter(lambda one: one.grad is not None, model.parameters()):
                    parameter.grad.mul_(1.0 + 1e-6 * torch.randn(parameter.shape, dtype=parameter.dtype))
            optimizer.step()
            optimizer.zero_grad()
    return str(path)


def _scaled(model: nn.Module, _step: int) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.01)


def _freezing(model: nn.Module, step: int) -> None:
    model.cell.weight_hh_l0.requires_grad_(step < 3)


def _beginning_at_zero(model: nn.Module, step: int) -> None:
    if step < 4:
        for parameter in model.parameters():
            parameter.grad.zero_()


def _as_it_is(model: nn.Module, step: int) -> None:
    pass


_TRAININGS = {
    "LSTM": (lambda: _Recurrent(nn.LSTM), _as_it_is),
    "GRU, gradients divided by hand": (lambda: _Recurrent(nn.GRU), _scaled),
    "LSTM, a weight is frozen": (lambda: _Recurrent(nn.LSTM), _freezing),
    "states in 16 bits": (lambda: _linear(torch.bfloat16), _as_it_is),
    "gradients that are zero at first": (_linear, _beginning_at_zero),
}


@pytest.mark.parametrize("training", _TRAININGS)
def test_floors_know_as_much_of_steps_that_waited_as_of_others(
    training: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, between = _TRAININGS[training]
    torch.manual_seed(0)
    baseline = _trained(tmp_path / "one", build(), between, fault=False)
    torch.manual_seed(0)
    candidate = _trained(tmp_path / "other", build(), between, fault=True)

    found, floors, num_waited = _compared_with_floors(baseline, candidate, monkeypatch, wait=True)
    at_once, expected, _ = _compared_with_floors(baseline, candidate, monkeypatch, wait=False)

    assert num_waited > 1
    for one in fields(RunFloors):
        assert repr(getattr(floors, one.name)) == repr(getattr(expected, one.name)), one.name
    assert found.to_json() == at_once.to_json()


def test_a_comparison_with_a_history_judges_each_step(tmp_path: Path) -> None:
    runs = [_recorded(tmp_path / "one"), _recorded(tmp_path / "other")]

    found = traindiff.compare(*runs, history=True)

    assert found.verdict == "identical"
    assert {row.num_identical_steps for row in found.differences if row.phase == "forward"} == {STEPS}
    assert traindiff.compare(*runs).to_json() == found.to_json()
