"""Baichuan2 #86: a model whose layers are spread over two GPUs loses hidden states on the way between them.

The report is about generated text. Here the same model is fine-tuned, because a recording is of a training. `Transfer`
stands for the copy from one GPU to the other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.peers.traincheck.programs.tasks import VOCABULARY, Record, sentences

LOST = frozenset({12, 15})
"""Steps in which the copy fails."""


class Transfer(nn.Module):
    """Copies its input; returns zeros where `fails` is set."""

    fails = False

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden) if self.fails else hidden.clone()


class Block(nn.Module):
    """A layer of a transformer with causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(functional.silu(self.up(self.mlp_norm(x))))


class SpreadModel(nn.Module):
    """A causal language model, with a copy between its two layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.first, self.transfer, self.second = Block(width), Transfer(), Block(width)
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.second(self.transfer(self.first(self.embedding(tokens))))))
        return logits


def train(record: Record, *, faulty: bool) -> None:
    """Train; in the faulty program, the second layer is given zeros in some steps."""
    torch.manual_seed(0)
    model = SpreadModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with record(model, optimizer):
        for step in range(18):
            tokens = sentences(step, length=17)
            model.transfer.fails = faulty and step in LOST
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
