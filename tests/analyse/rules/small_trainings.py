"""Small trainings, healthy unless something is done to them, and what `traindiff check` says of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import traindiff
from traindiff.analyse.check import Verdict
from traindiff.analyse.findings import Finding

Batches = Callable[[int], tuple[Tensor, Tensor]]
Moment = Callable[[int], None]


def points(step: int, *, samples: int = 32) -> tuple[Tensor, Tensor]:
    """Noisy points around four centres, and which center: a batch of its own for each step."""
    centres = 2.0 * torch.randn(4, 20, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(4, (samples,), generator=generator)
    return centres[labels] + torch.randn(samples, 20, generator=generator), labels


def images(step: int, *, samples: int = 16) -> tuple[Tensor, Tensor]:
    """Noisy images of four kinds."""
    kinds = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(4, (samples,), generator=generator)
    return kinds[labels] + torch.randn(samples, 3, 8, 8, generator=generator), labels


def classifier(
    act: type[nn.Module] = nn.ReLU, *, dropout: float = 0.0, width: int = 32, depth: int = 2
) -> nn.Sequential:
    """Linear layers, the same for every call."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(20, width), act()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), act()]
    if dropout:
        layers.insert(1, nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(width, 4))


def convolutions() -> nn.Sequential:
    """Two convolutions with batch normalization, the same for every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def train(
    path: Path, model: nn.Module, optimizer: Optimizer, *, steps: int = 20, batches: Batches = points,
    loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy, before_step: Moment = lambda step: None,
    after_backward: Moment = lambda step: None, after_step: Moment = lambda step: None,
    autocast: torch.dtype | None = None, scaler: torch.amp.GradScaler | None = None, micro_batches: int = 1,
    clip: float | None = None, **settings: Any,
) -> Path:  # fmt: skip
    """Train a classifier, and record it."""
    with traindiff.record(path, model, optimizer, strict=True, **settings) as run:
        for step in range(steps):
            before_step(step)
            optimizer.zero_grad()
            whole = 0.0
            for micro_step in range(micro_batches):
                inputs, labels = batches(step * micro_batches + micro_step)
                with torch.autocast("cpu", dtype=autocast) if autocast else nullcontext():
                    loss = loss_of(model(inputs), labels) / micro_batches
                (scaler.scale(loss) if scaler else loss).backward()
                whole += loss.item()
            if scaler and clip:
                scaler.unscale_(optimizer)
            if clip:
                run.log("grad_norm", nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            after_backward(step)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            after_step(step)
            run.log("loss", whole)
    return path


def found(verdict: Verdict, kind: str) -> Finding:
    """The first finding of a kind, of which there must be one."""
    return next(one for one in (*verdict.findings, *verdict.warnings) if one.kind == kind)


def kinds(verdict: Verdict) -> set[str]:
    """Kinds of all findings and warnings."""
    return {one.kind for one in (*verdict.findings, *verdict.warnings)}
