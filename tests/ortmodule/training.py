"""A training of two blocks, under PyTorch or ORTModule: training.py DIRECTORY (pytorch|ortmodule) [before] [fault]."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

from traindiff.compat.onnxruntime import GlobalSubscriberManager, StatisticsSubscriber, inspect_activation

STEPS = 4


class Block(nn.Module):
    """A residual block, of which what is between its layers is observed too."""

    def __init__(self, width: int, slope: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        hidden = inspect_activation("hidden", torch.relu(self.up(self.norm(x))) * self.slope)
        return x + self.down(hidden)


class Network(nn.Module):
    """Two blocks and a head."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(16, 1.0), Block(16, slope)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wrapped(model: nn.Module) -> nn.Module:
    """The model in an ORTModule, on a CPU: torch is built without the markers that ONNX Runtime sets."""
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    from onnxruntime.training.ortmodule import DebugOptions, LogLevel, ORTModule

    module: Any = ORTModule(model, DebugOptions(log_level=LogLevel.ERROR))
    return module


def main(directory: str, engine: str, *choices: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = Network(1.05 if "fault" in choices else 1.0)
    subscriber = StatisticsSubscriber(directory)
    if "before" in choices:
        GlobalSubscriberManager.subscribe(model, [subscriber])
    if engine == "ortmodule":
        model = wrapped(model)
    if "before" not in choices:
        GlobalSubscriberManager.subscribe(model, [subscriber])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        inputs, labels = torch.randn(8, 16, generator=draws), torch.randint(0, 4, (8,), generator=draws)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    sys.stdout.write(f"\n{json.dumps(losses)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
