"""The small model with parameters that no layer of a known kind uses: norms, positions, scales, functional calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.observe.sharding.training import LENGTH, WIDTH, Block, Model


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


class OwnBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale, self.slope = RMSNorm(), nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.mixed = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (super().forward(x).tanh() @ self.mixed) * self.slope.exp()


class OwnModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(2))
        self.norm, self.positions = RMSNorm(), nn.Parameter(torch.randn(1, LENGTH + 2, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.head.weight)
