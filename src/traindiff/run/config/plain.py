"""PyTorch on one process: the trusted way, which others are compared with."""

from __future__ import annotations

from traindiff.run.config.precision import autocast, computing_in
from traindiff.run.config.request import Request
from traindiff.run.config.stepping import Parts, compiled, stepped, with_optimizer
from traindiff.run.config.training import Training


def build(request: Request) -> Training:
    """The training as it is, in the setup's dtype."""
    setup = request.setup
    model, optimizer = request.model, with_optimizer(request)
    if setup.precision == "master":
        computing_in(model, setup)
        return stepped(request, Parts(model=compiled(model, setup), optimizer=optimizer))
    return stepped(
        request,
        Parts(model=compiled(model, setup), optimizer=optimizer, around=lambda: autocast(setup, request.device)),
    )
