"""DeepSpeed #1801: with tensor parallelism, only rank 0 clips the gradients of norms, so their copies part.

This is the error of the training of BLOOM. Each of two ranks holds half of the hidden units, and a copy of the norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from tests.peers.traincheck.programs.tasks import CLASSES, Record, points
from traindiff import shard

RANKS = 2

LIMIT = 0.1
"""Largest norm of all gradients."""


class _Copy(torch.autograd.Function):
    """Gives every rank the same input, and adds up the gradients."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous()
        distributed.all_reduce(total)
        return total


class _Sum(torch.autograd.Function):
    """Adds up the ranks' parts, and gives each of them the gradient."""

    @staticmethod
    def forward(_: Any, part: Tensor) -> Tensor:
        total = part.contiguous()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class Divided(nn.Module):
    """An MLP after a norm, whose hidden units are divided among the ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(20)
        whole_up, whole_down = nn.Linear(20, 64, bias=False), nn.Linear(64, CLASSES, bias=False)
        self.up, self.down = nn.Linear(20, 32, bias=False), nn.Linear(32, CLASSES, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(whole_up.weight.chunk(RANKS)[rank])
            self.down.weight.copy_(whole_down.weight.chunk(RANKS, dim=1)[rank])

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(_Copy.apply(self.norm(x))))
        result: Tensor = _Sum.apply(self.down(hidden))
        return result


def clip(model: Divided, rank: int, *, faulty: bool) -> None:
    """Clip the gradients to a norm of `LIMIT` over all ranks; the faulty one leaves out norms on rank 1."""
    divided = [model.up.weight.grad, model.down.weight.grad]
    copied = [one.grad for one in model.norm.parameters()]
    squares = sum((one.square().sum() for one in divided if one is not None), torch.zeros(()))
    distributed.all_reduce(squares)
    squares += sum(one.square().sum() for one in copied if one is not None)
    factor = min(1.0, LIMIT / (squares.sqrt().item() + 1e-6))
    for gradient in divided if faulty and rank else [*divided, *copied]:
        if gradient is not None:
            gradient.mul_(factor)


def train(record: Record, *, faulty: bool) -> None:
    """Train on two ranks with tensor parallelism."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = Divided(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ranks = distributed.group.WORLD
    shards = [
        shard("up", dim=-1, axis=ranks),
        shard("up.weight", dim=0, axis=ranks),
        shard("down", partial=True, axis=ranks),
        shard("down.weight", dim=1, axis=ranks),
    ]
    with record(model, optimizer, shards=shards):
        for step in range(8):
            inputs, labels = points(step)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            clip(model, rank, faulty=faulty)
            optimizer.step()
