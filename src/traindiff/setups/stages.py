"""The stage of a pipeline that a rank has, cut out of the whole model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import distributed
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

from traindiff.setups.model_calls import captured_call
from traindiff.setups.parameters import repeated_modules
from traindiff.setups.precision import dtype_of
from traindiff.setups.request import Request


def stage_of(request: Request) -> tuple[Any, Any]:
    """This rank's stage, and the training's batches.

    Raises:
        ConfigError: The recipe does not say how the model is divided, in fewer stages than there are ranks, or in a way
            that a short dtype does not allow.
    """
    cut = request.training.pipeline
    if cut is None:
        raise request.lacks(
            "pipeline",
            says="is not given, without which it is not known how a pipeline divides the model.",
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
            layer.compile()  # by themselves: what the schedule calls cannot be observed if it is compiled
    return stage, batches


def _traced(request: Request, paths: Sequence[str], batch: Any) -> Any:
    """A stage of the model as torch's tracing frontend cuts it, with an example of what it is called with."""
    num_stages, dtype = request.world_size, request.setup.dtype
    if dtype != "float32":
        raise request.lacks(
            "pipeline",
            says=f"is cut by torch's tracing frontend, whose stages expect float32 and would be sent {dtype}.",
            fix="Give a function of model, stage and number of stages that returns the module of that stage.",
        )
    if len(paths) < num_stages - 1:
        raise request.lacks(
            "pipeline",
            says=f"names {len(paths)} modules to cut before: {len(paths) + 1} stages at most, for {num_stages} ranks.",
            fix=f"Name at least {num_stages - 1}, or ask for fewer ranks.",
        )
    cuts = [paths[stage * (len(paths) + 1) // num_stages - 1] for stage in range(1, num_stages)]
    example = captured_call(request, request.equal_parts(batch, num_stages)[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch.export's own
        whole = pipeline(
            request.model, example.args, example.kwargs, split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING)
        )
    return whole.build_stage(request.rank, request.device, distributed.group.WORLD)


def _compute_in_dtype(request: Request, part: Any) -> None:
    """Enter the dtype for the part's forward pass only: the schedule runs backward passes in between."""
    if request.setup.dtype != "float32":
        part.forward = torch.autocast(request.device.type, dtype_of(request.setup))(part.forward)
