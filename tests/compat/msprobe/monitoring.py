"""Small monitored trainings, and their files read back."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from traindiff.compat.msprobe import PrecisionDebugger

Table = dict[str, dict[str, str]]
"""Rows by name of the parameter, cells by column."""


def configuration(where: Path, *, name: str = "dump", **settings: Any) -> Path:
    """A configuration file; `settings` of the gradient monitor stand where they belong."""
    own = {key: settings.pop(key) for key in ("grad_level", "param_list", "bounds", "hash") if key in settings}
    path = where / f"{name}.json"
    content = {
        "task": "grad_probe", "dump_path": str(where / name), "rank": [], "step": [], "grad_probe": own, **settings
    }  # fmt: skip
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


class Small(nn.Module):
    """Two layers with names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.fc(x).relu())
        return found


def small() -> Small:
    torch.manual_seed(0)
    return Small()


Gradients = list[dict[str, Tensor]]


def train(
    model: nn.Module,
    *,
    steps: int = 3,
    edit: Callable[[int, nn.Module], None] = lambda step, model: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Gradients:
    """Train, and return the gradients that the optimizer was given."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    found: Gradients = []
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        edit(step, model)
        found.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
        optimizer.step()
    return found


def monitored(where: Path, *, model: nn.Module | None = None, steps: int = 3, **settings: Any) -> Gradients:
    """A monitored training, whose files are in `where / "dump"`."""
    edit = settings.pop("edit", lambda step, model: None)
    optimizer = settings.pop("optimizer", None)
    model = small() if model is None else model
    debugger = PrecisionDebugger(configuration(where, **settings))
    debugger.monitor(model)
    found = train(model, steps=steps, edit=edit, optimizer=optimizer)
    debugger.stop()
    return found


def table(path: Path) -> Table:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return {row["param_name"]: row for row in csv.DictReader(file)}


def tables(dump: Path, rank: int = 0) -> list[Table]:
    """The tables of a rank, step by step, which must be numbered from 0 without gaps."""
    found = sorted(
        (dump / f"rank{rank}").glob("grad_summary_*.csv"), key=lambda path: int(path.stem.rpartition("_")[2])
    )
    assert [path.name for path in found] == [f"grad_summary_{step}.csv" for step in range(len(found))]
    return [table(path) for path in found]


def directions(dump: Path, step: int, name: str, rank: int = 0) -> Any:
    return np.load(dump / f"rank{rank}" / f"step{step}" / f"{name}.npy", allow_pickle=False)
