"""The workload: a GPT of 42 million parameters, batches of 4 x 128 tokens, AdamW."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, VOCABULARY, BATCH, CONTEXT = 512, 8, 8_000, 4, 128


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.act, self.out = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, context, width] -> the same."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, -1))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(found.transpose(1, 2).flatten(-2))
        return x + self.out(self.act(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    """Tokens -> logits; head and embedding share one matrix."""

    def __init__(
        self,
        layers: int,
        *,
        width: int = WIDTH,
        vocabulary: int = VOCABULARY,
        heads: int = HEADS,
        context: int = CONTEXT,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, context] -> [batch, context, vocabulary]."""
        x = self.wte(tokens) + self.wpe.weight
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


class Training:
    """A model, its optimizer, and batches."""

    def __init__(self, *, layers: int = 12, compiled: bool = False) -> None:
        torch.manual_seed(0)
        self.model = GPT(layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.call: Callable[[Tensor], Tensor] = torch.compile(self.model) if compiled else self.model
        self._generator = torch.Generator().manual_seed(1)

    def step(self) -> None:
        """One step of the optimizer."""
        tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=self._generator)
        logits = self.call(tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
