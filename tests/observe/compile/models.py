"""Small models with what makes compilation interesting."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import traindiff

WIDTH = 8


class Block(nn.Module):
    """With an activation that overwrites its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.relu(self.up(self.norm(x))))


class BreakingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return x + self.down(self.relu(hidden))


class Net(nn.Module):
    def __init__(self, layers: int = 2, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x)

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)


class BreakingNet(Net):
    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return layer(x)


class CheckpointedNet(Net):
    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False)


class InspectedNet(Net):
    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        return traindiff.inspect("between", layer(x) * 1.5)


class Narrowing(nn.Module):
    """More shapes than torch compiles one function for (8 by default)."""

    def __init__(self, layer: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        sizes = [WIDTH, *range(20, 8, -1)]
        self.layers = nn.ModuleList(layer(*pair) for pair in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class BreakingLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.shared(torch.tanh(self.shared(x))))


class Tokens(nn.Module):
    """Inputs that need no gradient, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.drop, self.head = nn.Embedding(10, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.embedding((x > 0).sum(-1))))


class Inner(nn.Module):
    """A module inside that returns a container."""

    def __init__(self, inner: nn.Module, logits: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(3, 2)
        self._logits = logits

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._logits(self.inner(x)))
