"""Record replicas of the small trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

import traindiff
from tests.observe.hooks.trainings import TRAININGS, Outcome
from traindiff.core.tap_registry import OBSERVABLE

OBSERVED = tuple(name for name in OBSERVABLE if name not in ("operators", "products"))
"""What a replica observes as its training does. What rounds is made of operators, too."""


def train(name: str, path: Path, replica: str | None, **options: Any) -> Outcome:
    """Train and record a replica, or the training as it is."""

    def observe(model: nn.Module, optimizer: Any) -> traindiff.Recorder:
        return traindiff.record(path, model, optimizer, observe=OBSERVED, strict=True, replica=replica, **options)

    return TRAININGS[name](observe)
