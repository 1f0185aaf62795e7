"""Recipes of a small training, right and wrong in known places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from traindiff.run.verify.recipe import Recipe

Change = Callable[[nn.Sequential], object]


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for further threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def mlp(
    *changes: Change,
    before_step: Change = lambda model: None,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Recipe:
    """A recipe of an MLP: `0` Linear, `1` GELU, `2` LayerNorm, `3` Linear, trained by AdamW with clipping.

    Args:
        changes: Made to the model before it trains.
        before_step: Made to it, or its gradients, before each step of the optimizer.
        micro_batches: Equal parts of each batch.
        dtype: Of the model and the batches.
    """

    def recipe() -> traindiff.Training:
        model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
        for change in changes:
            change(model)
        model.to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = torch.randn(20, 16, 6)

        def step(batch: Tensor) -> dict[str, Any]:
            optimizer.zero_grad()
            total = 0.0
            for part in batch.chunk(micro_batches):
                labels = (part[:, 0] > 0).long() + 2 * (part[:, 1] > 0).long()
                loss = functional.cross_entropy(model(part.to(dtype)), labels) / micro_batches
                loss.backward()
                total += loss.item()
            before_step(model)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return {"loss": total, "grad_norm": norm}

        return traindiff.Training(model=model, optimizer=optimizer, batches=batches, step=step)

    return recipe


def other_gelu(model: nn.Sequential) -> None:
    """A wrong operation: the output of `1`, and the gradient that it hands back to `0`."""
    model[1] = nn.GELU(approximate="tanh")


def other_epsilon(model: nn.Sequential) -> None:
    """A wrong operation: the output of `2`, the gradient that it hands back to `1`, and that of its weight."""
    model[2].eps = 1e-3


def doubled_gradient(model: nn.Sequential) -> None:
    """A wrong gradient: that of `3.weight`. For `before_step`."""
    weight = model[3].weight
    assert isinstance(weight, Tensor)
    assert weight.grad is not None
    weight.grad.mul_(2.0)
