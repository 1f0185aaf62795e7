"""Gradients that are mathematically zero: rounding alone is left of them, and two correct runs share nothing there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from tests.analyse.noise.test_site_floors import site
from tests.made_up import random
from traindiff.analyse.noise.lost import lost_in_rounding


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
