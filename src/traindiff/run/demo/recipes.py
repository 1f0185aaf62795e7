"""Two recipes: trainings that `traindiff verify` can run itself, and examples of how to write one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from traindiff.run.config.training import Training
from traindiff.run.demo.divisible import build_divisible_model, divide, stage_of
from traindiff.run.demo.model import Batch, ModelSize, make_batch, read_text

_BATCH_SIZE = 8


def gpt() -> Training:
    """The demo's GPT on the source of Python's standard library, which every engine can run."""
    size = ModelSize(width=128, num_heads=4)
    seed = int(torch.randint(1 << 31, ()))
    model, text = build_divisible_model(size, seed=seed), read_text()
    parameters = list(model.parameters())
    matrices, others = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]

    def batch(step: int) -> Batch:
        return make_batch(text, step, batch_size=_BATCH_SIZE, context=size.context, seed=seed)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch.inputs, sample_ids_B=batch.sample_ids)
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())

    return Training(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95)),
        batches=map(batch, range(1_000_000)),
        loss=loss,
        tensor_parallel=divide,
        pipeline=stage_of,
        # One vector per position: with one sample, as many as there are bytes in the batch.
        record={"batch_axis": {"embedding.wpe": None}},
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
