"""A small transformer with attention, trained on one rank or on several, on the same global batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

import traindiff

BATCH, LENGTH, VOCABULARY, WIDTH, HEADS = 4, 8, 20, 16, 4

# Shape suffixes: B samples, T positions, D width, H heads, K width of a head, V vocabulary.


class Core(nn.Module):
    """Attention on the heads of this rank."""

    def forward(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = Core()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (self._heads(w(x_BTD)) for w in (self.wq, self.wk, self.wv))
        mixed_BHTK = self.core(q_BHTK, k_BHTK, v_BHTK)
        return self.wo(mixed_BHTK.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.act(self.up(x_BTD)))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.ffn_norm = nn.LayerNorm(WIDTH)
        self.feed_forward = FeedForward()

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        return h_BTD + self.feed_forward(self.ffn_norm(h_BTD))


class Transformer(nn.Module):
    """[batch, length] of tokens -> [batch, length, VOCABULARY]."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten())


def train(
    path: str | os.PathLike[str],
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    *,
    model: Callable[[], nn.Module] = Transformer,
    steps: int = 2,
    dtype: torch.dtype = torch.float32,
    share: Callable[[], tuple[int, int]] = lambda: (0, 1),
    shards: Callable[[], Sequence[Any]] = tuple,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    before_step: Callable[[nn.Module], None] = lambda model: None,
    **settings: Any,
) -> None:
    """Train and record.

    `share` says which of how many parts of each batch this rank works on, and `around` what is entered for a loss and
    its backward pass.
    """
    torch.manual_seed(0)
    wrapped = prepare(model().to(dtype))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    rank, size = share()
    data = torch.Generator().manual_seed(1)
    declared = {"shards": shards()} if shards() else {}
    with traindiff.record(path, wrapped, optimizer, strict=True, **declared, **settings):
        for _ in range(steps):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data)
            mine = tokens.chunk(size)[rank]
            with around():
                loss(wrapped(mine[:, :-1]), mine[:, 1:]).backward()
            before_step(wrapped)
            optimizer.step()
            optimizer.zero_grad()


def world_size() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1
