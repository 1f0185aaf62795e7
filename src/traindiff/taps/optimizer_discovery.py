"""Find the optimizers of a model when they first step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from traindiff.taps.inner_optimizer import inner_optimizer
from traindiff.taps.loss_scaler import ScalerListener, tap_loss_scaler


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
