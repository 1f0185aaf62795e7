"""pytorch #115607: after a step without gradients, a compiled optimizer never moves its parameters again.

Dynamo specialized the step on the missing gradients, and kept that code. `StuckAdam` does the same in today's torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.peers.traincheck.programs.tasks import CLASSES, Record, points

EMPTY = 6
"""The step whose backward pass is left out."""


class StuckAdam(torch.optim.Adam):
    """Adam that steps no more, once no parameter had a gradient."""

    stuck = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, unless stuck."""
        self.stuck |= all(one.grad is None for group in self.param_groups for one in group["params"])
        return None if self.stuck else super().step(closure)


def train(record: Record, *, faulty: bool) -> None:
    """Train; in the middle, one step has no gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Sigmoid(), nn.Linear(32, CLASSES))
    optimizer = (StuckAdam if faulty else torch.optim.Adam)(model.parameters(), lr=1e-2)
    with record(model, optimizer):
        for step in range(16):
            inputs, labels = points(step)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), labels)
            if step != EMPTY:
                loss.backward()
            optimizer.step()
