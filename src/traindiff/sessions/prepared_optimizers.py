"""Optimizers that a library has wrapped, and what is inside."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

_LIBRARIES = ("accelerate", "lightning", "pytorch_lightning")


def unprepared(optimizer: Any) -> Any:
    """The optimizer inside one that Accelerate or Lightning has prepared, which steps when it is time; else itself.

    Their wrappers have torch's class for a base and none of its hooks, or share them. Imports none of the libraries.
    """
    if type(optimizer).__module__.partition(".")[0] not in _LIBRARIES:
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer
