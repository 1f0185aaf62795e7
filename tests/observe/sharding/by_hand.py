"""A transformer that is divided over ranks by hand, as Megatron does it: plain tensors, own autograd functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from tests.observe.sharding.transformer import HEADS, VOCABULARY, WIDTH, world_size


class CopyIn(torch.autograd.Function):
    """Forward nothing, backward the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        distributed.all_reduce(gradient)
        return gradient


class SumOut(torch.autograd.Function):
    """Forward the sum over ranks, backward nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Core(nn.Module):
    """Attention on the heads of this rank; queries, keys and values in one tensor."""

    def forward(self, qkv_BTE: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for part in qkv_BTE.chunk(3, dim=2)
        )  # fmt: skip
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """With `parts` > 1 it is this rank's part of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.core = Core()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.parts = 1

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._sum(self.proj(self.core(self.qkv(self._copy(self.norm1(x))))))
        return x + self._sum(self.down(self.act(self.up(self._copy(self.norm2(x))))))

    def _copy(self, x: Tensor) -> Tensor:
        return CopyIn.apply(x) if self.parts > 1 else x

    def _sum(self, x: Tensor) -> Tensor:
        return SumOut.apply(x) if self.parts > 1 else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def divided(model: Model) -> Model:
    """Keep this rank's part of every weight that Megatron divides."""
    rank, size = distributed.get_rank(), world_size()

    def keep(parameter: nn.Parameter, dim: int, blocks: int = 1) -> nn.Parameter:
        parts = [block.chunk(size, dim)[rank] for block in parameter.data.chunk(blocks, dim)]
        return nn.Parameter(torch.cat(parts, dim).contiguous())

    for block in model.blocks:
        block.parts = size
        block.qkv.weight, block.qkv.bias = keep(block.qkv.weight, 0, 3), keep(block.qkv.bias, 0, 3)
        block.proj.weight = keep(block.proj.weight, 1)
        block.up.weight, block.up.bias = keep(block.up.weight, 0), keep(block.up.bias, 0)
        block.down.weight = keep(block.down.weight, 1)
    return model
