"""x/jxmnop: a trainer that calls the model itself in one step, and a new DistributedDataParallel around it in the next.

Only steps through the wrapper add up gradients over ranks.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.peers.traincheck.programs.tasks import CLASSES, Record, points

RANKS = 2


def train(record: Record, *, faulty: bool) -> None:
    """Train on two ranks; the faulty program calls the bare model in every other step."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, CLASSES))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with record(wrapped, optimizer):
        for step in range(8):
            inputs, labels = points(2 * step + rank)
            called = model if faulty and step % 2 else wrapped
            loss = functional.cross_entropy(called(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
