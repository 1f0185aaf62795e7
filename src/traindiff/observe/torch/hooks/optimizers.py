"""Find the optimizers of a model when they first step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from traindiff.core._torch_compat import is_nested_step
from traindiff.observe.torch.hooks.followed_modules import HeldHooks
from traindiff.observe.torch.hooks.left_behind import InertOnCopy
from traindiff.observe.torch.hooks.loss_scale import ScalerListener, tap_loss_scaler

StepHook = Callable[..., Any]
"""Called with the optimizer, and with positional and keyword arguments of its `step`."""


def hook_before_step(optimizer: Optimizer, hook: StepHook) -> HeldHooks:
    """Have `hook` called before each step, until the result is removed."""
    hooks = HeldHooks()
    hooks.before_step(optimizer, _Once(hook))
    return hooks


def hook_after_step(optimizer: Optimizer, hook: StepHook) -> HeldHooks:
    """Have `hook` called after each step, until the result is removed."""
    hooks = HeldHooks()
    hooks.after_step(optimizer, _Once(hook))
    return hooks


class _Once(InertOnCopy):
    def __init__(self, hook: StepHook) -> None:
        self._hook = hook

    def __call__(self, optimizer: Optimizer, *arguments: Any) -> None:
        if is_compiling() or not is_nested_step(optimizer):
            self._hook(optimizer, *arguments)


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


def tap_optimizer_discovery(
    parameter_ids: Collection[int], found: Callable[..., None], *, known: WeakSet[Optimizer]
) -> ExitStack:
    """Call `found` before the first step of each optimizer that holds one of the parameters.

    Args:
        parameter_ids: Ids of the model's parameters.
        found: Called with the optimizer, and with what its `step` was called with, inside its `step`, before its own
            hooks: those that it registers run in this very step.
        known: Is filled with those that were looked at, which is not done again; what is taken out is found again.

    Returns:
        Close it to remove the tap.
    """

    def before_step(optimizer: Optimizer, *call: Any) -> None:
        if optimizer in known:
            return
        known.update((optimizer, inner_optimizer(optimizer)))
        if any(id(p) in parameter_ids for group in optimizer.param_groups for p in group["params"]):
            found(optimizer, *call)

    undo = ExitStack()
    undo.enter_context(tap_loss_scaler(ScalerListener(before=before_step)))  # which may leave out the very first step
    undo.callback(register_optimizer_step_pre_hook(before_step).remove)
    return undo
