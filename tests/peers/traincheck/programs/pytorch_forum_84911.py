"""PyTorch forum 84911: a fine-tuning freezes everything but batch normalization, the new head included.

The optimizer holds the head alone. So it moves nothing, and what is not frozen is in no optimizer.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.peers.traincheck.programs.tasks import CLASSES, Record, images


class Pretrained(nn.Module):
    """A small network of convolutions, with a head for other classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.relu(self.bn2(self.conv2(x)))
        logits: torch.Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def train(record: Record, *, faulty: bool) -> None:
    """Train a new head; the faulty program freezes it with the rest."""
    torch.manual_seed(0)
    model = Pretrained()
    model.fc = nn.Linear(16, CLASSES)
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=1e-2)
    for name, parameter in model.named_parameters():
        if "bn" not in name or not faulty:
            parameter.requires_grad = False
    for parameter in model.fc.parameters():
        parameter.requires_grad = not faulty
    with record(model, optimizer):
        for step in range(16):
            inputs, labels = images(step)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
