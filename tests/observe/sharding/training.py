"""A small training on one rank or on several: the same global batches, the same parameters."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

import traindiff

BATCH, LENGTH, VOCABULARY, WIDTH = 8, 6, 19, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    """[batch, length] of tokens -> [batch, length, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rank_and_size() -> tuple[int, int]:
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(
    path: str | os.PathLike[str],
    prepare: Callable[[Model], nn.Module] = lambda model: model,
    *,
    steps: int = 3,
    micro_batches: int = 1,
    shares: bool = True,
    before_step: Callable[[nn.Module], None] = lambda model: None,
    loss_scale: float = 1.0,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
    finds_optimizer: bool = False,
    no_sync: bool = False,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    make: Callable[[], Model] = Model,
    before_micro_batch: Mapping[int, Callable[[nn.Module], None]] = MappingProxyType({}),
    **settings: Any,
) -> None:
    """Train and record. `shares` says whether each rank has a part of the batch, or all of it.

    `no_sync` reduces gradients after the last micro-batch only. Other settings are those of `traindiff.record`.
    """
    torch.manual_seed(0)
    wrapped = prepare(make().to(dtype))
    optimizer = make_optimizer(wrapped.parameters())
    rank, size = rank_and_size() if shares else (0, 1)
    data = torch.Generator().manual_seed(1)
    with traindiff.record(path, wrapped, None if finds_optimizer else optimizer, strict=True, **settings):
        for _ in range(steps):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data)
            for number, part in enumerate(tokens.chunk(micro_batches)):
                mine = part.chunk(size)[rank]
                is_last = number == micro_batches - 1
                before_micro_batch.get(number, lambda model: None)(wrapped)
                with wrapped.no_sync() if no_sync and not is_last else nullcontext():
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        logits = wrapped(mine[:, :-1])
                        loss = functional.cross_entropy(logits.flatten(0, 1).float(), mine[:, 1:].flatten())
                    (loss * (loss_scale / micro_batches)).backward()
            before_step(wrapped)
            optimizer.step()
            optimizer.zero_grad()
