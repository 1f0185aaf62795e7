"""Two recipes: trainings that `traindiff verify` can run itself, and examples of how to write one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from traindiff.demo.loop import DemoSettings, TrainingLoop
from traindiff.setups.training import Training


def gpt() -> Training:
    """The demo's GPT, on the source of Python's standard library; a batch is the number of a step."""
    loop = TrainingLoop(DemoSettings(), micro_batches=1, seed=0)

    def step(number: int) -> dict[str, float]:
        numbers = loop.run_step(number)
        return {"loss": numbers.loss, "grad_norm": numbers.gradient_norm}

    return Training(
        model=loop.model,
        optimizer=loop.optimizer,
        batches=range(1_000_000),
        step=step,
        record={"batch_axis": {"transformer.wpe": None}},
    )


def mlp() -> Training:
    """Two layers that learn to tell in which quarter of the plane a point lies."""
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    points = torch.randn(100, 32, 2)

    def step(batch: Tensor) -> Tensor:
        labels = (batch[:, 0] > 0).long() + 2 * (batch[:, 1] > 0).long()
        loss = functional.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model=model, optimizer=optimizer, batches=points, step=step)
