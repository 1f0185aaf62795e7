"""The optimizer inside another one: `ZeroRedundancyOptimizer` has one for the parameters that this rank updates."""

from __future__ import annotations

import sys

from torch.optim import Optimizer


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """What updates this rank's parameters and keeps their state; for most optimizers that is the optimizer itself.

    `ZeroRedundancyOptimizer` steps it, then broadcasts what it has written. With `overlap_with_ddp` it has none
    that can be followed.
    """
    module = sys.modules.get("torch.distributed.optim")
    kind = getattr(module, "ZeroRedundancyOptimizer", None)
    if kind is None or not isinstance(optimizer, kind):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer
