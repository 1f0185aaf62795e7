"""Stack Overflow 60335387: `zero_grad` is missing, so each step also has the gradients of all steps before."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.peers.traincheck.programs.tasks import CLASSES, Record, images


def train(record: Record, *, faulty: bool) -> None:
    """Train; the faulty program never forgets a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(),
        nn.Linear(32, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with record(model, optimizer):
        for step in range(12):
            inputs, labels = images(step)
            if not faulty:
                optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
