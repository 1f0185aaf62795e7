"""Parameters that are averages of others, which no optimizer holds: computed in another way, or with another decay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import traindiff

Average = Callable[[Tensor, Tensor, float], object]
"""Moves the first tensor towards the second."""

IN_PLACE: Average = lambda mean, new, decay: mean.mul_(decay).add_(new, alpha=1 - decay)  # noqa: E731
WAYS: dict[str, Average] = {
    "lerp": lambda mean, new, decay: mean.lerp_(new, 1 - decay),
    "expression": lambda mean, new, decay: mean.copy_(decay * mean + (1 - decay) * new),
    "in float32": lambda mean, new, decay: mean.copy_(decay * mean.float() + (1 - decay) * new.float()),
}


class Taught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 10)) for _ in range(2))
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


def trained(path: Path, average: Average = IN_PLACE, *, decay: float, dtype: torch.dtype) -> Path:
    torch.manual_seed(0)
    model = Taught().to(dtype)
    optimizer = torch.optim.AdamW(model.student.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(5):
            data = torch.Generator().manual_seed(step)
            x, y = torch.randn(32, 16, generator=data).to(dtype), torch.randint(10, (32,), generator=data)
            found, wanted = (out.float() for out in model(x))
            (cross_entropy(found, y) + mse_loss(found, wanted)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, new in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                    average(mean, new, decay)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", [0.9, 0.99])
def test_averages_that_are_computed_otherwise_are_equivalent(dtype: torch.dtype, decay: float, tmp_path: Path) -> None:
    baseline = trained(tmp_path / "baseline", decay=decay, dtype=dtype)
    for name, way in WAYS.items():
        found = traindiff.compare(baseline, trained(tmp_path / name, way, decay=decay, dtype=dtype))
        assert found.exit_code == 0, (name, found.first_divergence)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_decay_shows_in_the_average(dtype: torch.dtype, tmp_path: Path) -> None:
    baseline = trained(tmp_path / "baseline", decay=0.999, dtype=dtype)
    found = traindiff.compare(baseline, trained(tmp_path / "candidate", decay=0.99, dtype=dtype))

    first = found.first_divergence
    assert first is not None
    assert (found.verdict, first.step, first.path, first.kind) == ("diverged", 1, "teacher.0.weight", "edited")
    assert "otherwise in each run" in first.message
