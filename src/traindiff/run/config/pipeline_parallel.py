"""Trainings under `torch.distributed.pipelining`: each rank has one stage of the model and sees every micro-batch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline

from traindiff.core.site import canonical_path
from traindiff.core.torch_compat.training import parameters_by_name, parameters_in
from traindiff.run.config.precision import autocast, dtype_of
from traindiff.run.config.request import Request
from traindiff.run.config.sharded import ParameterNames, follow, names_of, repeated_modules
from traindiff.run.config.stepping import with_optimizer
from traindiff.run.config.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """The arguments of a call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Called(BaseException):  # not an Exception, so that a loss does not catch it
    """Ends a loss as soon as the loss calls the model."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__()
        self.call = call


class _Asking(nn.Module):
    """Stands in for the model to learn its arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Never returns."""
        raise _Called(ModelCall(args=args, kwargs=kwargs))


class _Answering(nn.Module):
    """Stands in for the model, and gives once an output that was computed elsewhere."""

    def __init__(self, request: Request, output: Any) -> None:
        super().__init__()
        self.request = request
        self.outputs = [output]

    def forward(self, *_: Any, **__: Any) -> Any:
        """The output.

        Raises:
            ConfigError: The loss asks for it a second time.
        """
        if not self.outputs:
            raise self.request.lacks(
                "loss",
                message="calls the model twice for one batch, which a pipeline cannot compute.",
                fix="Call the first argument of loss once for all samples.",
            )
        return self.outputs.pop()


def captured_call(request: Request, batch: Any) -> ModelCall:
    """The arguments with which the recipe's loss calls the model for a batch.

    Raises:
        ConfigError: The loss does not call the model.
    """
    try:
        request.loss(_Asking(), batch)
    except _Called as called:
        return called.call
    raise request.lacks(
        "loss",
        message="does not call the model that it is given, so that a pipeline cannot compute it.",
        fix="Call the first argument of loss once, as a function: model(inputs).",
    )


def loss_of_output(request: Request, output: Any, batch: Any) -> Tensor:
    """The recipe's loss of a batch, given the model's output for it.

    Raises:
        ConfigError: The loss calls the model more than once.
    """
    return request.loss(_Answering(request, output), batch)


def joined(calls: Sequence[ModelCall]) -> ModelCall:
    """One call for several parts of a batch: tensors are concatenated, the rest is taken from the first part."""
    args = tuple(_joined([call.args[place] for call in calls]) for place in range(len(calls[0].args)))
    kwargs = {name: _joined([call.kwargs[name] for call in calls]) for name in calls[0].kwargs}
    return ModelCall(args=args, kwargs=kwargs)


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    return torch.cat(list(values)) if isinstance(first, Tensor) and first.ndim else first


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A parameter that several ranks hold.

    Attributes:
        parameter: This rank's copy.
        group: Process group of the ranks that hold it.
        is_counted_here: True on the one rank that counts its gradient in a norm.
    """

    parameter: nn.Parameter
    group: Any
    is_counted_here: bool


def shared_parameters(part: nn.Module, names: ParameterNames) -> list[Shared]:
    """The parameters of this rank's stage that other ranks hold too. A collective.

    Args:
        part: This rank's stage of the model.
        names: Names of the whole model's parameters.
    """
    mine = {
        names.first[name]: parameter
        for path, parameter in parameters_by_name(part).items()
        if (name := canonical_path(path)) in names.first
    }
    everyones: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyones, sorted(mine))
    found = []
    for name in sorted({name for held in everyones for name in held}):
        ranks = [rank for rank, held in enumerate(everyones) if name in held]
        if len(ranks) > 1:
            group = distributed.new_group(ranks)  # all ranks must call this, also those outside the group
            if name in mine:
                is_first = distributed.get_rank() == ranks[0]
                found.append(Shared(parameter=mine[name], group=group, is_counted_here=is_first))
    return found


def add_up_gradients(shared: Sequence[Shared]) -> None:
    """Give every rank the sum of the gradients of each shared parameter. A collective."""
    for one in shared:
        if one.parameter.grad is None:
            one.parameter.grad = torch.zeros_like(one.parameter)
        distributed.all_reduce(one.parameter.grad, group=one.group)


def clip_over_stages(part: nn.Module, largest_norm: float, shared: Sequence[Shared]) -> None:
    """Scale the gradients of all stages down to one norm over all stages. A collective."""
    elsewhere = {id(one.parameter) for one in shared if not one.is_counted_here}
    parameters = [parameter for parameter in parameters_in(part) if parameter.grad is not None]
    counted = [one.grad for one in parameters if id(one) not in elsewhere and one.grad is not None]
    square = nn.utils.get_total_norm(counted).square()
    distributed.all_reduce(square)
    nn.utils.clip_grads_with_norm_(parameters, largest_norm, square.sqrt())


def stage_of(request: Request) -> tuple[Any, Any]:
    """This rank's stage, and the training's batches.

    Raises:
        ConfigError: The recipe does not say how the model is divided, names fewer stages than there are ranks, or
            divides it in a way that a short dtype does not allow.
    """
    cut = request.training.pipeline
    if cut is None:
        raise request.lacks(
            "pipeline",
            message="is not given, without which it is not known how a pipeline divides the model.",
            fix='Give traindiff.Training(pipeline=["layers.1", ...]), paths of modules before which it may be cut, or '
            "a function of model, stage and number of stages that returns the module of that stage.",
        )
    batches: Any = request.training.batches
    if callable(cut):
        part = cut(request.model, request.rank, request.world_size)
        stage: Any = PipelineStage(part, request.rank, request.world_size, request.device)
    else:
        ahead = iter(batches)
        first = next(ahead)
        stage = _traced(request, cut, first)
        batches = chain([first], ahead)
    _compute_in_dtype(request, stage.submod)
    if request.setup.compile:
        for layer in repeated_modules(stage.submod) or [stage.submod]:
            layer.compile()  # separately: a compiled stage could not be observed
    return stage, batches


def _traced(request: Request, paths: Sequence[str], batch: Any) -> Any:
    """A stage of the model, cut by torch's tracing frontend with `batch` as its example."""
    num_stages, dtype = request.world_size, request.setup.dtype
    if dtype != "float32":
        raise request.lacks(
            "pipeline",
            message=f"is cut by torch's tracing frontend, whose stages expect float32 and would be sent {dtype}.",
            fix="Give a function of model, stage and number of stages that returns the module of that stage.",
        )
    if len(paths) < num_stages - 1:
        raise request.lacks(
            "pipeline",
            message=f"names {len(paths)} modules to cut before: {len(paths) + 1} stages at most, "
            f"for {num_stages} ranks.",
            fix=f"Name at least {num_stages - 1}, or ask for fewer ranks.",
        )
    cuts = [paths[stage * (len(paths) + 1) // num_stages - 1] for stage in range(1, num_stages)]
    example = captured_call(request, request.equal_parts(batch, num_stages)[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch.export raises them
        whole = pipeline(
            request.model, example.args, example.kwargs, split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING)
        )
    return whole.build_stage(request.rank, request.device, distributed.group.WORLD)


def _compute_in_dtype(request: Request, part: Any) -> None:
    """Enter autocast for the stage's forward pass only, because the schedule runs backward passes in between."""
    if request.setup.dtype != "float32":
        part.forward = torch.autocast(request.device.type, dtype_of(request.setup))(part.forward)


def build(request: Request) -> Training:
    """The training as a pipeline with one stage and one micro-batch per rank, by the schedule 1F1B.

    Gradients of tied parameters that several stages hold are added up.

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
