"""Samples in another order: what lies between batch and gradients is not compared, and rounds all the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff


class Scan(nn.Module):
    """A recurrence of products, whose gradients cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.rate, self.outlet = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], 8)
        for position in range(x.shape[1]):
            keep = torch.exp(-nn.functional.softplus(self.rate(x[:, position])))
            state = keep * state + (1 - keep) * self.inlet(x[:, position])
        return self.outlet(state)


def recorded(path: Path, *, order: list[int] | None = None, wrong: float = 1.0) -> str:
    torch.manual_seed(0)
    model = Scan()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    with traindiff.record(path, model, optimizer):
        for _ in range(3):
            x, y = torch.randn(8, 24, 6, generator=generator), torch.randn(8, 3, generator=generator)
            if order is not None:
                x, y = x[order], y[order]
            (model(x) - y).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad.mul_(wrong)
            optimizer.step()
            optimizer.zero_grad()
    return str(path)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_order_of_samples_is_no_divergence(tmp_path: Path, seed: int) -> None:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()
    found = traindiff.compare(recorded(tmp_path / "a"), recorded(tmp_path / "b", order=order))
    assert found.verdict == "equivalent"


def test_a_fault_beside_it_is_still_found(tmp_path: Path) -> None:
    order = [3, 1, 0, 2, 7, 6, 5, 4]
    found = traindiff.compare(recorded(tmp_path / "a"), recorded(tmp_path / "b", order=order, wrong=1.001))
    assert found.verdict not in ("equivalent", "identical")
    assert math.isfinite(max(row.difference for row in found.differences if row.phase == "grad"))


@pytest.mark.parametrize(("axis", "verdict"), [(0, "equivalent"), (1, "misaligned")], ids=["samples", "channels"])
def test_under_autocast_only_another_order_of_samples_is_a_representation(
    axis: int, verdict: str, tmp_path: Path
) -> None:
    """Gradients are float32 there, and their floors are those of bfloat16."""

    def run(path: Path, *, other: bool) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(1)
        with traindiff.record(path, model, optimizer):
            for _ in range(2):
                x, y = torch.rand(8, 3, 6, 6, generator=generator), torch.arange(8) % 4
                if other:
                    x, y = x.flip(axis), y.flip(0) if axis == 0 else y
                with torch.autocast("cpu", torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return str(path)

    assert traindiff.compare(run(tmp_path / "a", other=False), run(tmp_path / "b", other=True)).verdict == verdict


class Weights(nn.Module):
    """A module without a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))


class Listed(nn.Module):
    """Parameters in modules that are never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.held = nn.ModuleList(
            [nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(2)]) for _ in range(3)]
        )
        self.own = Weights()
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.randn(6))})

    def forward(self, x: Tensor) -> Tensor:
        for one in self.held:
            x = torch.tanh(x * one[0] + one[1])
        return (x * self.own.weight + self.named["bias"]).sum(-1)


def trained(
    path: Path, model: nn.Module, loss: Callable[[Any, Tensor], Tensor], *, of: str, factor: float, lr: float
) -> str:
    """Two steps; in the second one, the gradient of a parameter is multiplied by a factor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with traindiff.record(path, model, optimizer):
        for step in range(2):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            loss(model, x).backward()  # type: ignore[no-untyped-call]
            model.get_parameter(of).grad.mul_(factor if step else 1.0)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    return str(path)


def test_lists_of_parameters_hide_no_gates(tmp_path: Path) -> None:
    def listed(name: str, factor: float) -> str:
        loss = lambda model, x: model(x).square().mean()  # noqa: E731
        return trained(tmp_path / name, Listed(), loss, of="held.1.0", factor=factor, lr=1e-3)

    found = traindiff.compare(listed("a", 1.0), listed("b", 1.003)).first_divergence
    assert found is not None
    assert (found.step, found.phase, found.path) == (1, "grad", "held.1.0")


class ActorCritic(nn.Module):
    """A root without a forward pass, which holds a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.actor, self.critic = nn.Linear(6, 3), nn.Linear(6, 1)
        self.log_std = nn.Parameter(torch.zeros(3))


def test_a_root_without_a_forward_pass_is_compared(tmp_path: Path) -> None:
    def loss(model: ActorCritic, x: Tensor) -> Tensor:
        mean = model.actor(x) * model.log_std.exp()
        return mean.square().mean() + model.critic(x).square().mean()

    def acting(name: str, factor: float) -> str:
        return trained(tmp_path / name, ActorCritic(), loss, of="log_std", factor=factor, lr=1e-2)

    baseline = acting("a", 1.0)
    assert traindiff.compare(baseline, acting("same", 1.0)).verdict == "identical"
    found = traindiff.compare(baseline, acting("b", 1.01)).first_divergence
    assert found is not None
    assert (found.step, found.phase, found.path) == (1, "grad", "log_std")
