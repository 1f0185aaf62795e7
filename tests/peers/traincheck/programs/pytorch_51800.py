"""pytorch #51800: the spectral norm of a fresh layer is not estimated yet when it is first evaluated.

`torch.nn.utils.spectral_norm` estimates the largest singular value in forward passes in training mode only. Before
these, it divides the weight by a number that means nothing. The script of the issue looks at how good the fresh model
is, and only then trains it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.peers.traincheck.programs.tasks import CLASSES, Record, points

SETTINGS = {"evaluation": True}


def train(record: Record, *, faulty: bool) -> None:
    """Train, and evaluate before it (faulty) or after it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(20, 64)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(64, 64)), nn.ReLU(),
        nn.Linear(64, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(points(1000)[0])
        model.train()

    with record(model, optimizer, **SETTINGS):
        if faulty:
            evaluate()
        for step in range(8):
            inputs, labels = points(step)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            evaluate()
