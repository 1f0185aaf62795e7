"""The recipe of `make test-gpu` for `traindiff doctor`."""

from __future__ import annotations

import torch
from torch.nn import functional

import traindiff
from tests.gpu.training import Training


def training() -> traindiff.Training:
    """The small Transformer of these tests on the GPU."""
    made = Training(device=torch.device("cuda"))
    data = torch.Generator().manual_seed(1)
    batches = [torch.randint(19, (8, 7), generator=data).to("cuda") for _ in range(8)]

    def step(tokens: torch.Tensor) -> None:
        functional.cross_entropy(made.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        made.optimizer.step()
        made.optimizer.zero_grad()

    return traindiff.Training(model=made.model, optimizer=made.optimizer, batches=batches, step=step)
