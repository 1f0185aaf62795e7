"""DistributedDataParallel: copies on all ranks, each with its part of every micro-batch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from traindiff.setups.precision import autocast
from traindiff.setups.request import Request
from traindiff.setups.stepping import Parts, stepped
from traindiff.setups.training import Training
from traindiff.setups.variants import compiled, with_optimizer


def build(request: Request) -> Training:
    """The training under DDP, which exchanges gradients after the last micro-batch of a step."""
    optimizer = with_optimizer(request)
    wrapped = DistributedDataParallel(request.model)

    def unfinished() -> AbstractContextManager[Any]:
        without: AbstractContextManager[Any] = wrapped.no_sync()
        return without

    return stepped(
        request,
        Parts(
            model=compiled(wrapped, request.setup),
            optimizer=optimizer,
            part=request.rank,
            parts=request.world_size,
            around=lambda: autocast(request.setup, request.device),
            unfinished=unfinished,
        ),
    )
