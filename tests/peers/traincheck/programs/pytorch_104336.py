"""pytorch #104336: a model that is moved after DistributedDataParallel has wrapped it is no longer synchronized.

The issue moves the model to the CPU and back to the GPU. On a machine with CPUs alone, another dtype and back does the
same: autograd drops the nodes that accumulate gradients, on which the wrapper has put its hooks.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.peers.traincheck.programs.tasks import CLASSES, Record, images

RANKS = 2


def train(record: Record, *, faulty: bool) -> None:
    """Train on two ranks; the faulty program moves the wrapped model away and back."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES)
    )
    wrapped = DistributedDataParallel(model)
    if faulty:
        wrapped.double()
        wrapped.float()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    with record(wrapped, optimizer):
        for step in range(8):
            inputs, labels = images(2 * step + rank)
            optimizer.zero_grad()
            functional.cross_entropy(wrapped(inputs), labels).backward()
            optimizer.step()
