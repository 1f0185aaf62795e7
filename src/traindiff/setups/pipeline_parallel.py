"""`torch.distributed.pipelining`: each rank has one stage of the model, and sees every micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.pipelining import Schedule1F1B

from traindiff.setups.model_calls import captured_call, joined, loss_of_output
from traindiff.setups.parameters import follow, names_of
from traindiff.setups.precision import autocast
from traindiff.setups.request import Request
from traindiff.setups.shared_parameters import add_up_gradients, clip_over_stages, shared_parameters
from traindiff.setups.stages import stage_of
from traindiff.setups.training import Training
from traindiff.setups.variants import with_optimizer


def build(request: Request) -> Training:
    """The training as a pipeline with one stage per rank, in as many micro-batches as ranks, by the schedule 1F1B.

    Of what the recipe ties and several stages hold, gradients are added up.

    Raises:
        ConfigError: The recipe does not say how the model is divided.
    """
    setup, num_stages = request.setup, request.world_size
    names, optimizer = names_of(request.model), with_optimizer(request)
    stage, batches = stage_of(request)
    part = stage.submod
    follow(request, optimizer, names, part)
    shared = shared_parameters(part, names)
    micro_batches: list[Any] = []

    def loss_of(output: Any, number: Tensor) -> Tensor:
        with autocast(setup, request.device):
            return loss_of_output(request, output, micro_batches[int(number)])

    schedule = Schedule1F1B(stage, num_stages, loss_fn=loss_of, scale_grads=True)

    def step(batch: Any) -> Tensor:
        micro_batches[:] = request.equal_parts(batch, num_stages)
        call = joined([captured_call(request, one) for one in micro_batches])
        args = call.args if stage.is_first else ()
        kwargs = call.kwargs if stage.is_first or callable(request.training.pipeline) else {}
        losses: list[Tensor] = []
        if stage.is_last:
            schedule.step(*args, target=torch.arange(num_stages), losses=losses, **kwargs)
        else:
            schedule.step(*args, **kwargs)
        add_up_gradients(shared)
        total = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=request.device)
        distributed.broadcast(total, src=num_stages - 1)
        if setup.gradient_clipping:
            clip_over_stages(part, setup.gradient_clipping, shared)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return replace(request.training, model=part, optimizer=optimizer, batches=batches, step=step)
