"""Optimizers whose updates are not linear in their gradients: floors, and what is still found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import traindiff
from traindiff.analyse.compare import Comparison

Direction = Callable[[Tensor], Tensor]


def orthogonal(m: Tensor) -> Tensor:
    """All directions of a matrix, equally long, by five iterations of Newton and Schulz."""
    x = m / (m.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


def signs(m: Tensor) -> Tensor:
    return m.sign()


def itself(m: Tensor) -> Tensor:
    return m


class Directed(torch.optim.Optimizer):
    """Moves matrices along a function of their momentum, and vectors along their momentum."""

    def __init__(self, parameters: Any, direction: Direction, *, momentum: float, factor: float = 1.0) -> None:
        super().__init__(parameters, {"lr": 0.01, "momentum": momentum})
        self.direction, self.factor = direction, factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                moved = parameter.grad
                if group["momentum"]:
                    held = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                    moved = held.mul_(group["momentum"]).add_(parameter.grad)
                if parameter.ndim == 2:
                    moved = self.direction(moved) * self.factor
                parameter.add_(moved, alpha=-group["lr"])


def trained(
    path: Path, direction: Direction, *, momentum: float = 0.9, parts: int = 1, factor: float = 1.0, half: bool = False
) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    if half:
        model.to(torch.bfloat16)
    optimizer = Directed(model.parameters(), direction, momentum=momentum, factor=factor)
    data = torch.Generator().manual_seed(1)
    with traindiff.record(path, model, optimizer):
        for _ in range(4):
            x = torch.randn(64, 10, generator=data)
            for part in x.split(64 // parts):
                logits = model(part.to(torch.bfloat16) if half else part)
                (cross_entropy(logits.float(), part[:, :4].argmax(-1)) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def compared(tmp_path: Path, direction: Direction, **candidate: Any) -> Comparison:
    same = {name: candidate[name] for name in ("momentum", "half") if name in candidate}
    baseline = trained(tmp_path / "baseline", direction, **same)
    return traindiff.compare(baseline, trained(tmp_path / "candidate", direction, **candidate))


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("direction", [orthogonal, signs, itself])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_rounding_turns_in_an_update_is_no_divergence(
    direction: Direction, momentum: float, half: bool, tmp_path: Path
) -> None:
    found = compared(tmp_path, direction, momentum=momentum, parts=4, half=half)

    assert found.verdict == "equivalent", str(found)


@pytest.mark.parametrize("direction", [orthogonal, signs, itself])
def test_an_update_of_another_size_is_found(direction: Direction, tmp_path: Path) -> None:
    first = compared(tmp_path, direction, parts=4, factor=0.9).first_divergence

    assert first is not None
    assert (first.step, first.phase, first.path) == (0, "update", "0.weight")


def test_floors_of_linear_updates_stay_small(tmp_path: Path) -> None:
    rows = compared(tmp_path, itself, parts=4).differences

    updates = [row for row in rows if row.phase == "update"]
    assert updates
    assert all(row.floor < 1e-3 for row in updates)
