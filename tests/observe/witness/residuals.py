"""Residuals of a recorded training: how far the gradients are from what was expected of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import traindiff
from traindiff.analyse.merge.run_steps import run_steps
from traindiff.analyse.merge.witnessed import Witnessed, rms, witnessed
from traindiff.core.observation import WITNESS
from traindiff.core.witness import EXPECTED
from traindiff.storage import open_recording

OBSERVED = ("grad", "witness", "loss")
RIGHT = 2.0
"""Largest difference, in multiples of what rounding explains, of a right gradient; the rule allows twice as much."""


def record(
    path: Path, model: nn.Module, batches: Sequence[Any], loss_of: Callable[[nn.Module, Any], Tensor], *,
    per_step: int = 1, change: Callable[[nn.Module, int], None] = lambda model, step: None, zero: bool = True,
    optimizer: torch.optim.Optimizer | None = None, given: bool = True, **settings: Any,
) -> Path:  # fmt: skip
    """Train with `per_step` backward passes in each step; `change` may change gradients before the optimizer.

    The recording finds the optimizer by itself if it is not `given`.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    with traindiff.record(path, model, optimizer if given else None, strict=True, **{"observe": OBSERVED, **settings}):
        for number, batch in enumerate(batches):
            (loss_of(model, batch) / per_step).backward()
            if (number + 1) % per_step == 0:
                change(model, number // per_step)
                optimizer.step()
                if zero:
                    optimizer.zero_grad()
    return path


def gradients(path: Path) -> list[list[Witnessed]]:
    """The gradients that were witnessed, by step."""
    return [witnessed(step.table) for step in run_steps(open_recording(str(path)))]


def ratios(path: Path) -> dict[str, float]:
    """The largest difference of each gradient in any step, in multiples of what rounding explains, by path."""
    found: dict[str, float] = {}
    for step in gradients(path):
        for one in step:
            worst = max(rms(given - one.expected) for _, given in one.given) / one.allowed
            found[one.entry.key.path] = max(worst, found.get(one.entry.key.path, 0.0))
    return found


def reasons(path: Path) -> dict[str, str]:
    """Why gradients were not witnessed, by path."""
    return {
        key.path: entry.unobserved
        for step in run_steps(open_recording(str(path)))
        for key, entry in step.table.items()
        if key.stage == WITNESS and key.slot == EXPECTED and entry.unobserved
    }


def contributed(path: Path) -> set[str]:
    """Paths of gradients of which what the backward passes contributed was taken as it is."""
    return {one.entry.key.path for step in gradients(path) for one in step if one.contributed}
