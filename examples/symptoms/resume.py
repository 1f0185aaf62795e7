"""A training whose checkpoint forgets the schedule of the learning rate: `traindiff resume resume.py:recipe --at 5`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import traindiff


def recipe() -> traindiff.Training:
    """The training, with its own way to save and to load."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 16, generator=generator) for _ in range(12)]

    def step(batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss

    def save(directory: Path) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, directory / "checkpoint.pt")

    def load(directory: Path) -> int:
        saved = torch.load(directory / "checkpoint.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return 5

    return traindiff.Training(model=model, optimizer=optimizer, batches=batches, step=step, save=save, load=load)
