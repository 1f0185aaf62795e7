"""Gradients that are mathematically zero: rounding alone is left of them, and two correct runs share nothing there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from tests.analyse.noise.test_site_floors import site
from tests.made_up import random
from traindiff.analyse.noise.lost import lost_in_rounding, lost_rows, num_lost_rows


def test_only_what_is_below_a_rounding_of_the_largest_in_both_runs_is_lost() -> None:
    values = random(8, 4, seed=0)
    large = site(values, path="head", phase="backward")
    lost = site(values * 2.0**-26, values[::-1].copy() * 2.0**-26, path="router", phase="backward")
    small = site(values * 2.0**-20, path="first", phase="backward")
    arrived = site(values * 2.0**-26, values, path="again", phase="backward")
    nothing = site(values * 0.0, path="unused", phase="backward")
    gradient = site(values * 2.0**-26, path="router.weight", phase="grad")  # the largest of its phase
    forward = site(values * 2.0**-26, path="router")
    found = lost_in_rounding([large, lost, small, arrived, nothing, gradient, forward])
    assert list(found) == [lost.baseline.key]
    assert found[lost.baseline.key] == pytest.approx(1.5 * 2)


class Routed(nn.Module):
    """Each token goes to one of four experts; the weight of the one is divided by itself, so it is 1."""

    def __init__(self, linear: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.router = nn.Embedding(50, 32), nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 50)
        self.__dict__["linear"] = linear

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.embedding(tokens).flatten(0, -2)
        weights, chosen = self.router(rows).float().softmax(-1).topk(1, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(rows.dtype)
        found = rows
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            found = found.index_add(0, row, torch.tanh(expert(rows[row])) * weights[row, place, None])
        logits: Tensor = self.__dict__["linear"](self.head, found)
        return logits


def whole(layer: nn.Linear, rows: Tensor) -> Tensor:
    found: Tensor = layer(rows)
    return found


def in_halves(layer: nn.Linear, rows: Tensor) -> Tensor:
    """The same, with other roundings on the way back."""
    parts = zip(layer.weight.chunk(2), layer.bias.chunk(2), strict=True)
    return torch.cat([functional.linear(rows, weight, bias) for weight, bias in parts], -1)


def train(
    path: Path, linear: Callable[[nn.Linear, Tensor], Tensor] = whole, *, dtype: torch.dtype, doubled: str = ""
) -> Path:
    torch.manual_seed(0)
    model = Routed(linear).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with traindiff.record(path, model, optimizer):
        for step in range(4):
            tokens = torch.randint(0, 50, (8, 24), generator=torch.Generator().manual_seed(step))
            functional.cross_entropy(model(tokens[:, :-1]).float(), tokens[:, 1:].flatten()).backward()
            if doubled:
                gradient = model.get_parameter(doubled).grad
                assert gradient is not None
                gradient *= 2
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_router_that_is_zero_but_for_rounding_is_no_finding(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    baseline = train(tmp_path / "whole", dtype=dtype)
    found = traindiff.compare(baseline, train(tmp_path / "halves", in_halves, dtype=dtype))
    assert found.verdict == "equivalent"
    wrong = traindiff.compare(
        baseline, train(tmp_path / "wrong", in_halves, dtype=dtype, doubled="experts.1.weight")
    ).first_divergence
    assert wrong is not None
    assert (wrong.step, wrong.phase, wrong.path) == (0, "grad", "experts.1.weight")


def without_rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    values = random(24, 16, seed=3)
    lost = values.copy()
    lost[:count] = 0.0
    return values, lost


def test_rows_that_are_zero_in_one_run_only_are_counted() -> None:
    values, lost = without_rows(2)

    assert num_lost_rows(site(values, lost, path="a.weight", phase="grad")) == 2
    assert num_lost_rows(site(lost, values, path="a.weight", phase="grad")) == 2
    assert num_lost_rows(site(values, values, path="a.weight", phase="grad")) == 0
    assert num_lost_rows(site(values, values * 0.0, path="a.weight", phase="grad")) == 0  # all of it is lost
    some = values.copy()
    some[:2, :8] = 0.0
    assert num_lost_rows(site(values, some, path="a.weight", phase="grad")) == 1  # as many zeros as a row has elements
    assert num_lost_rows(site(values[:, :4].copy(), lost[:, :4].copy(), path="a.weight", phase="grad")) == 0


def test_a_lost_row_is_held_to_a_rounding_unless_a_gate_turned() -> None:
    values, lost = without_rows(1)
    pair = site(values, lost, path="a.weight", phase="grad")
    smooth = site(values, path="a", phase="backward")
    turned = values.copy()
    turned[3, 3] = 0.0

    assert lost_rows([smooth, pair]) == {pair.baseline.key: 2.0**-24}
    assert lost_rows([site(values, turned, path="a", phase="backward"), pair]) == {}
    assert lost_rows([smooth, site(values, path="a.weight", phase="grad")]) == {}


class Weak(nn.Module):
    """A row of the first layer's gradient is small, as its unit hardly counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 32), nn.Linear(32, 8)
        with torch.no_grad():
            self.second.weight[:, 5] *= 0.05

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x)))
        return found


def weakly_trained(path: Path, *, lost: bool, autocast: bool) -> Path:
    torch.manual_seed(0)
    model = Weak() if autocast else Weak().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            x = torch.randn(64, 24, generator=torch.Generator().manual_seed(step)).to(model.first.weight.dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                model(x).float().square().mean().backward()
            gradient = model.first.weight.grad
            assert gradient is not None
            if lost and step == 1:
                gradient[5] = 0.0
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("autocast", [False, True])
def test_a_small_row_that_is_lost_in_sixteen_bits_is_found(autocast: bool, tmp_path: Path) -> None:
    whole = weakly_trained(tmp_path / "whole", lost=False, autocast=autocast)
    found = traindiff.compare(whole, weakly_trained(tmp_path / "lost", lost=True, autocast=autocast))

    first = found.first_divergence
    assert first is not None
    assert (found.verdict, first.step, first.phase, first.path) == ("diverged", 1, "grad", "first.weight")
    assert first.difference < 0.016
    assert "24 of 768 elements are zero in the candidate and not in the baseline" in first.message
