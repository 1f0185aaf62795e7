"""pytorch #84803: a batch that is copied to the second GPU arrives as zeros, as `DataParallel` divides it.

The issue comes from GPUs whose peer-to-peer access does not work. `scatter` stands for that copy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.peers.traincheck.programs.tasks import CLASSES, Record, images

LOST = frozenset({9, 13})
"""Steps in which the copy fails."""


def scatter(batch: Tensor, *, fails: bool) -> Tensor:
    """The batch as two devices hold it: the first half stays, the second one is copied."""
    kept, moved = batch.chunk(2)
    return torch.cat([kept, torch.zeros_like(moved) if fails else moved.clone()])


def train(record: Record, *, faulty: bool) -> None:
    """Train; in the faulty program, half of some batches is lost."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with record(model, optimizer):
        for step in range(16):
            inputs, labels = images(step)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(scatter(inputs, fails=faulty and step in LOST)), labels)
            loss.backward()
            optimizer.step()
