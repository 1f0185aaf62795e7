"""lightning-thunder #725: autocast no longer applies to a primitive function, so one layer computes in float32.

`PrimitiveLinear` stands for a layer that the transformation misses: it calls its product where autocast is off.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.peers.traincheck.programs.tasks import CLASSES, Record, points


class PrimitiveLinear(nn.Linear):
    """A linear layer on which autocast has no effect if `missed` is set."""

    missed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.missed:
            return super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return functional.linear(x.float(), self.weight, self.bias)


class Model(nn.Module):
    """An MLP with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(20, 32)
        self.layers = nn.ModuleList(PrimitiveLinear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        logits: Tensor = self.head(x)
        return logits


def train(record: Record, *, faulty: bool) -> None:
    """Train under autocast to bfloat16."""
    torch.manual_seed(0)
    model = Model()
    model.layers[2].missed = faulty  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with record(model, optimizer):
        for step in range(12):
            inputs, labels = points(step)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
