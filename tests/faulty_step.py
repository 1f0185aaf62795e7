"""Faults in the step of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer


def at_end_of_step(optimizer: Optimizer, fault: Callable[[Optimizer], object]) -> None:
    """Have `fault` called with the optimizer at the end of its own step, before hooks.

    What a hook changes is not the optimizer's doing. `_optimizer_step_code` is what torch calls there.
    """
    vars(optimizer)["_optimizer_step_code"] = partial(fault, optimizer)
