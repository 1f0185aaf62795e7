"""DistributedDataParallel: copies on all ranks, each with its part of every micro-batch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from traindiff.run.config.precision import autocast
from traindiff.run.config.request import Request
from traindiff.run.config.stepping import Parts, compiled, stepped, with_optimizer
from traindiff.run.config.training import Training


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
