"""Samples in another order: activations are compared by norms and sums alone, which do not show gates that turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import traindiff


def with_batch_norm() -> nn.Sequential:
    """ReLU behind BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def with_pooling() -> nn.Sequential:
    """ReLU and max pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def train(
    path: Path, make: Callable[[], nn.Sequential], dtype: torch.dtype, *, seed: int, reorder: bool, fault: str = ""
) -> Path:
    torch.manual_seed(seed)
    model = make().to(dtype)
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3)) if reorder else torch.arange(32)
    with traindiff.record(path, model, optimizer, strict=True):
        for step in range(4):
            generator = torch.Generator().manual_seed(100 * seed + step)
            inputs = torch.randn(32, 3, 8, 8, generator=generator).to(dtype)[order]
            labels = torch.randint(10, (32,), generator=generator)[order]
            functional.cross_entropy(model(inputs).float(), labels).backward()
            assert weight.grad is not None
            if step == 2 and fault == "doubled":
                weight.grad.mul_(2.0)
            elif step == 2 and fault == "row":
                weight.grad[0] = 0.0
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [with_batch_norm, with_pooling])
def test_samples_in_another_order_are_the_same_training(
    tmp_path: Path, make: Callable[[], nn.Sequential], dtype: torch.dtype, seed: int
) -> None:
    baseline = train(tmp_path / "baseline", make, dtype, seed=seed, reorder=False)
    result = traindiff.compare(baseline, train(tmp_path / "other", make, dtype, seed=seed, reorder=True))

    assert result.verdict == "equivalent", str(result)


@pytest.mark.parametrize("fault", ["doubled", "row"])
@pytest.mark.parametrize("make", [with_batch_norm, with_pooling])
def test_a_wrong_gradient_behind_another_order_is_found(
    tmp_path: Path, make: Callable[[], nn.Sequential], fault: str
) -> None:
    baseline = train(tmp_path / "baseline", make, torch.bfloat16, seed=0, reorder=False)
    candidate = train(tmp_path / "wrong", make, torch.bfloat16, seed=0, reorder=True, fault=fault)
    first = traindiff.compare(baseline, candidate).first_divergence

    assert first is not None
    assert (first.step, first.phase, first.path) == (2, "grad", "0.weight")
