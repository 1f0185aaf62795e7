"""Gradients that come back through gates (ReLU), whose masks are right, and wrong in more elements than noise turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import traindiff
from traindiff.analyse.compare.verdict import Comparison

Mask = Callable[[Tensor], Tensor]


class Gate(torch.autograd.Function):
    """ReLU with a mask of its own in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Mask) -> Tensor:
        ctx.save_for_backward(mask(x))
        return x.clamp_min(0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return gradients[0] * mask, None


def right(x: Tensor) -> Tensor:
    return x > 0


def above_a_threshold(x: Tensor) -> Tensor:
    return x > 0.05


def without_two_rows(x: Tensor) -> Tensor:
    mask = x > 0
    mask[3:5] = False
    return mask


def without_some(x: Tensor) -> Tensor:
    return (x > 0) & (torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) > 0.1)


def without_half(x: Tensor) -> Tensor:
    mask = x > 0
    mask[:, : x.shape[1] // 2] = False
    return mask


class Gated(nn.Module):
    def __init__(self, mask: Mask | None) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 48), nn.Linear(48, 48), nn.Linear(48, 4)
        self.dropout = nn.Dropout(0.2)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(x)))
        x = torch.relu(x) if self.mask is None else Gate.apply(x, self.mask)
        y: Tensor = self.last(self.dropout(x))
        return y


def trained(path: Path, mask: Mask | None, *, dtype: torch.dtype, fused: bool, rate: float = 2e-3) -> Path:
    torch.manual_seed(0)
    model = Gated(mask).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=fused)
    with traindiff.record(path, model, optimizer):
        for step in range(8):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(48, 12, generator=generator), torch.randint(4, (48,), generator=generator)
            torch.manual_seed(step)
            cross_entropy(model(x.to(dtype)).float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def compared(where: Path, mask: Mask | None, dtype: torch.dtype) -> Comparison:
    baseline = trained(where / "b", None, dtype=dtype, fused=False)
    return traindiff.compare(baseline, trained(where / "c", mask, dtype=dtype, fused=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, right])
def test_gates_that_rounding_turns_are_noise(mask: Mask | None, dtype: torch.dtype, tmp_path: Path) -> None:
    found = compared(tmp_path, mask, dtype)

    assert (found.verdict, found.findings) == ("equivalent", ())


@pytest.mark.parametrize("mask", [above_a_threshold, without_two_rows, without_some, without_half])
def test_a_wrong_mask_is_found_where_it_is(mask: Mask, tmp_path: Path) -> None:
    found = compared(tmp_path, mask, torch.float32)

    first = found.first_divergence
    assert found.verdict == "diverged"
    assert first is not None
    assert (first.step, first.phase, first.path) == (0, "backward", "second")


def test_half_of_a_gradient_is_missed_in_bfloat16_too(tmp_path: Path) -> None:
    first = compared(tmp_path, without_half, torch.bfloat16).first_divergence

    assert first is not None
    assert (first.phase, first.path) == ("backward", "second")
