"""Private names of what a training holds: modules, hooks, optimizers, gradient clipping, loss scalers, data loaders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

# Modules

children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""The dict of a module's own children. The public iterators are slower, and leave out what appears twice."""

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""The dict of a module's own parameters, to exchange them without `__setattr__`, which checks them."""

buffers_of: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
"""The dict of a module's own buffers; `named_buffers` makes a set of all of them each time."""


def live_children_of(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a module that may be half made, or taken apart; runs none of its code."""
    children = vars(module).get("_modules") or {}
    return (child for child in dict(children).values() if isinstance(child, nn.Module))


def is_data_parallel_copy(module: nn.Module) -> bool:
    """True for the copies that `torch.nn.DataParallel` makes for each call. There is no public mark."""
    return bool(getattr(module, "_is_replica", False))


# Hooks

# The attributes in which torch keeps hooks, by key. Publicly a hook has a handle, which removes it from the dict that
# there was when it was attached; nothing tells whether it is still called, or which hooks there are.
FORWARD_HOOKS = "_forward_hooks"
FORWARD_PRE_HOOKS = "_forward_pre_hooks"
STEP_PRE_HOOKS = "_optimizer_step_pre_hooks"
STEP_POST_HOOKS = "_optimizer_step_post_hooks"
EVERY_STEP_PRE_HOOKS = "_global_optimizer_pre_hooks"  # of the module torch.optim.optimizer
GRADIENT_HOOKS = "_backward_hooks"  # of a tensor

# Optimizers


@cache
def _step_code() -> CodeType:
    """The code of the function in which torch wraps the `step` of each class of optimizers, to call hooks."""

    def step(*_: Any) -> None:
        pass

    wrapped: Any = torch.optim.Optimizer.profile_hook_step(step)
    code: CodeType = wrapped.__code__
    return code


def is_nested_step(optimizer: torch.optim.Optimizer) -> bool:
    """True if a hook of `optimizer.step` runs within another call of it: a subclass calls the `step` of its base.

    torch wraps the `step` of a class when an instance of it is made, so hooks run twice in one step of an optimizer if
    there is also one of its base class. There is no public way to tell the calls apart.
    """
    return _running_steps(optimizer) > 1


def is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """True if the caller runs within a call of `optimizer.step`, as hooks of other optimizers may."""
    return _running_steps(optimizer) > 0


def _running_steps(optimizer: torch.optim.Optimizer) -> int:
    calls, step = 0, _step_code()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is step and frame.f_locals["args"][0] is optimizer:
            calls += 1
        frame = frame.f_back
    return calls


def scale_of(scaler: Any) -> torch.Tensor | None:
    """The scale of a `GradScaler`, on its device; None before the first loss. The public way waits for the device."""
    scale: torch.Tensor | None = scaler._scale
    return scale


CLIPS_WITH_NORM = "_clip_grads_with_norm_"
"""The function of `torch.nn.utils.clip_grad` to which every call of `clip_grad_norm_` leads, since torch 2.6.

Its public name is another attribute of the same module's package; `clip_grad_norm_` does not look it up there.
"""

# Loaders


def loader_iterators() -> type[Any]:
    """The base class of all iterators of a `DataLoader`, with and without workers.

    There is no hook for what a loader yields, and no public name for what yields it; iterators that were made before
    could not be followed by their loader.
    """
    return torch.utils.data.dataloader._BaseDataLoaderIter


def index_sampler_of(iterator: Any) -> Any:
    """The sampler that draws the indices of an iterator's batches: one per loader, which the iterator does not know."""
    return iterator._index_sampler


def is_loader_worker(process: Any) -> bool:
    """True for a process that loads data for a `DataLoader`: it runs a function of torch. There is no public mark."""
    return getattr(getattr(process, "_target", None), "__module__", "") == "torch.utils.data._utils.worker"


# Printing


def print_options() -> dict[str, Any]:
    """The options of `torch.set_printoptions` as they are now; publicly they can be set and not read."""
    from torch import _tensor_str

    return dict(vars(_tensor_str.PRINT_OPTS))
