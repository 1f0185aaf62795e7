"""Stack Overflow 67180955: all workers of a data loader draw the same random numbers from NumPy.

torch seeds NumPy for each worker since 1.9. A `worker_init_fn` that sets one seed for all, for the sake of
reproducibility, brings the error back.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from tests.peers.traincheck.programs.tasks import Record

WORKERS = 2


class Crops(Dataset[tuple[NDArray[np.float32], int]]):
    """Random crops of noise around a wave: samples that are drawn anew each time."""

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int]:
        label = np.random.randint(2)
        wave = np.sin(np.arange(16) * (1.0 + label) + np.random.uniform(0.0, 6.0))
        return (wave + 0.3 * np.random.randn(16)).astype(np.float32), label

    def __len__(self) -> int:
        return 256


def seed_alike(_: int) -> None:
    """Seed NumPy with the same number in every worker."""
    np.random.seed(1)


def seed_apart(number: int) -> None:
    """Seed NumPy with another number in every worker."""
    np.random.seed(1 + number)


def train(record: Record, *, faulty: bool) -> None:
    """Train on one epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Crops(), 16, num_workers=WORKERS, worker_init_fn=seed_alike if faulty else seed_apart)
    with record(model, optimizer):
        for inputs, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
