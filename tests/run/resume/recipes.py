"""Trainings that save everything, or leave out one thing when they load."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

import traindiff
from tests.run.resume.parts import AT


@dataclass
class Data:
    """Batches in a shuffled order, which a generator draws as they are asked for."""

    generator: torch.Generator
    position: int = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            rows = torch.randint(200, (16,), generator=self.generator)
            self.position += 1
            yield torch.randn(200, 4, generator=torch.Generator().manual_seed(7))[rows]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.position = state["position"]


class Noisy(nn.Module):
    """Adds noise from NumPy's and Python's generators."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * np.random.randn() + 0.01 * random.random()


@dataclass
class Held:
    """Everything that the training holds."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any
    scaler: Any
    average: AveragedModel
    data: Data


def held() -> Held:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), Noisy(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Held(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        scaler=torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2),  # type: ignore[attr-defined]
        average=AveragedModel(model),
        data=Data(torch.Generator().manual_seed(3)),
    )


Change = Callable[[dict[str, Any]], object]


def training(change: Change = lambda _: None, *, also: Callable[[Held], object] = lambda _: None) -> traindiff.Training:
    """The training, whose `load` gets what was saved after a change."""
    has = held()

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = has.model(batch).square().mean()
        has.scaler.scale(loss).backward()
        has.scaler.step(has.optimizer)
        has.scaler.update()
        has.optimizer.zero_grad()
        has.scheduler.step()
        has.average.update_parameters(has.model)
        return loss

    parts = {name: getattr(has, name) for name in ("model", "optimizer", "scheduler", "scaler", "average", "data")}

    def save(directory: Path) -> None:
        numpy, python = np.random.get_state(), random.getstate()
        state = {name: one.state_dict() for name, one in parts.items()}
        torch.save(
            {**state, "torch": torch.get_rng_state(), "numpy": (*numpy[:1], numpy[1].tolist(), *numpy[2:]),
             "python": python},
            directory / "all.pt",
        )  # fmt: skip

    def load(directory: Path) -> None:
        saved = torch.load(directory / "all.pt", weights_only=True)
        change(saved)
        for name, one in parts.items():
            if name in saved:
                one.load_state_dict(saved[name], **({"strict": False} if name == "model" else {}))
        if "torch" in saved:
            torch.set_rng_state(saved["torch"])
        if "numpy" in saved:
            kind, key, *rest = saved["numpy"]
            np.random.set_state((kind, np.array(key, dtype=np.uint32), *rest))
        if "python" in saved:
            version, inner, gauss = saved["python"]
            random.setstate((version, tuple(inner), gauss))
        also(has)

    return traindiff.Training(
        model=has.model, optimizer=has.optimizer, batches=has.data, step=step, save=save, load=load
    )  # fmt: skip


def without(name: str) -> Callable[[], traindiff.Training]:
    """The training that leaves out one thing of what was saved."""
    return partial(training, lambda saved: saved.pop(name))


def by_default() -> traindiff.Training:
    """The training without functions of its own."""
    given = training()
    return traindiff.Training(
        model=given.model, optimizer=given.optimizer, batches=given.batches, step=given.step
    )  # fmt: skip


def complete() -> traindiff.Training:
    """The training that restores everything."""
    return training()


def without_scheduler() -> traindiff.Training:
    """The training that forgets its scheduler, for a command."""
    return without("scheduler")()


def with_generator(
    model: nn.Module, optimizer: Optimizer, batches: Tensor, *, restore: Callable[[Tensor], Any] = torch.set_rng_state
) -> traindiff.Training:
    """A plain loop that saves weights, the optimizer and torch's generator, whose state `restore` is given."""

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def save(path: Path) -> None:
        torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()], path / "a.pt")

    def load(path: Path) -> int:
        weights, state, random_state = torch.load(path / "a.pt", weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        restore(random_state)
        return AT

    return traindiff.Training(model=model, optimizer=optimizer, batches=batches, step=step, save=save, load=load)
