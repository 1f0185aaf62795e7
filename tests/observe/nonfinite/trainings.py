"""Small trainings that are watched, and go wrong in one place."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff

WIDTH = 8


class Scale(nn.Module):
    """Multiplies by a number that a test changes."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class _Steep(torch.autograd.Function):
    """Passes numbers on, and multiplies gradients."""

    @staticmethod
    def forward(context: Any, x: Tensor, factor: float) -> Tensor:
        context.factor = factor
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return gradient * context.factor, None


class Steep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return _Steep.apply(x, self.factor)


class Net(nn.Module):
    """Two layers with code of their own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.act = nn.ReLU()
        self.scale = Scale()
        self.steep = Steep()
        self.last = nn.Linear(16, 4)
        self.between = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.first(x))
        hidden = self.steep(self.scale(hidden))
        return self.last(hidden * self.between)


Breaks = Callable[[Any, torch.optim.Optimizer, int], None]


def train(
    *,
    breaks: Breaks = lambda model, optimizer, step: None,
    make: Callable[[], nn.Module] = Net,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = 3,
    micro_batches: int = 1,
    batch: Tensor | None = None,
    loss_of: Callable[[Tensor], Tensor] = lambda output: output.square().mean(),
    given: bool = True,
    **settings: Any,
) -> tuple[Any, str]:
    """Train and watch; gives the watch, and what it printed."""
    torch.manual_seed(0)
    model = make()
    optimizer_ = optimizer(model.parameters(), lr=1e-2)
    batch = torch.randn(6, WIDTH) if batch is None else batch
    file = io.StringIO()
    settings = {"output": None, "file": file, **settings}
    with traindiff.watch(model, optimizer_ if given else None, **settings) as watch:
        for step in range(steps):
            breaks(model, optimizer_, step)
            for part in batch.chunk(micro_batches):
                loss_of(model(part)).backward()
            optimizer_.step()
            optimizer_.zero_grad()
    return watch, file.getvalue()


def found(**settings: Any) -> str:
    """What is said of a training that goes wrong."""
    with pytest.raises(traindiff.NonFiniteError) as caught:
        train(**settings)
    return str(caught.value)
