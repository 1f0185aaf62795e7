"""Four small models, each of a family whose gradients behave differently."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 61
CLASSES = 10


class Mlp(nn.Module):
    """Two hidden layers with LayerNorm: [batch, 20] -> [batch, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(20, 64)
        self.norm = nn.LayerNorm(64)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.0)
        self.fc2 = nn.Linear(64, 64)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.fc1(x)))
        return self.head(self.drop(functional.relu(self.fc2(x))))


class Attention(nn.Module):
    """Causal attention with separate projections; without RoPE the key bias has no effect."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.fused = False
        self.leak = 0
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.fused:
            found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / sqrt(q.shape[-1])
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1 + self.leak)
            found = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return self.proj(found.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.act(self.fc(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    """Two blocks: [batch, length] of tokens -> [batch, length, VOCABULARY]."""

    def __init__(self, *, width: int = 32, heads: int = 2, length: int = 16, tied: bool = False) -> None:
        super().__init__()
        self.first_position = 0
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(length + 1, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.wte.weight, std=0.1)
        nn.init.normal_(self.wpe.weight, std=0.1)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device) + self.first_position)
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm: [batch, 3, 8, 8] -> [batch, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1, stride=2)
        self.bn2 = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.relu(self.bn2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class LstmClassifier(nn.Module):
    """Embedding and an LSTM: [batch, length] of tokens -> [batch, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 24, batch_first=True)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(tokens))
        return self.head(states[:, -1])
