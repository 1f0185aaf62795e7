"""transformers #33844: attention drops out in evaluation, because it calls dropout as a function with its own rate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.peers.traincheck.programs.tasks import VOCABULARY, Record, sentences

SETTINGS = {"evaluation": True}


class Attention(nn.Module):
    """Causal attention with dropout; the faulty one does not look at its mode."""

    def __init__(self, width: int, *, dropout: float, faulty: bool) -> None:
        super().__init__()
        self.dropout, self.faulty = dropout, faulty
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        rate = self.dropout if self.training or self.faulty else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        result: Tensor = self.out(mixed.squeeze(1))
        return result


class Model(nn.Module):
    """A causal language model of one layer."""

    def __init__(self, *, faulty: bool, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, width), nn.LayerNorm(width)
        self.attention = Attention(width, dropout=0.1, faulty=faulty)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        logits: Tensor = self.head(self.norm(x + self.dropout(self.attention(x))))
        return logits


def train(record: Record, *, faulty: bool) -> None:
    """Train, and evaluate after each step on the same sentences."""
    torch.manual_seed(0)
    model = Model(faulty=faulty)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with record(model, optimizer, **SETTINGS):
        for step in range(8):
            tokens = sentences(step)
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model(sentences(1000)[:, :-1])
            model.train()
