"""Two trainings of one small model, for `traindiff investigate`: in the second, a block scales its attention otherwise.

traindiff investigate examples/attention.py:trusted --candidate examples/attention.py:rescaled
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from traindiff import Training

WIDTH = 32


class Attention(nn.Module):
    """One head of attention, by hand."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> the same."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = query @ key.transpose(-2, -1)
        weights = (scores * self.scale).softmax(dim=-1)
        return self.out(weights @ value)


class Block(nn.Module):
    """Attention behind a LayerNorm, with dropout, around which the input goes too."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(scale)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> the same."""
        return x + self.dropout(self.attention(self.norm(x)))


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss."""
    return model(batch).square().mean()


def training(scale_of_second: float) -> Training:
    """Two blocks between two linear layers."""
    model = nn.Sequential(nn.Linear(8, WIDTH), Block(WIDTH**-0.5), Block(scale_of_second), nn.Linear(WIDTH, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Training(model=model, optimizer=optimizer, batches=torch.randn(8, 6, 5, 8), loss=mean_square)


def trusted() -> Training:
    """As it should be."""
    return training(WIDTH**-0.5)


def rescaled() -> Training:
    """The second block multiplies the scores of its attention by 1/4."""
    return training(0.25)
