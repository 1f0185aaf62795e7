"""Losses that are scaled so that small gradients do not underflow in a short dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from traindiff.setups.setup import Setup

_INITIAL_SCALE = 2.0**16
"""torch's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaler:
    """Backward pass and optimizer step with a scale, or with none.

    Attributes:
        optimizer: That steps.
        scaler: torch's; None where nothing is scaled.
        stays_at: The scale that never changes; None for a dynamic one.
    """

    optimizer: Optimizer
    scaler: GradScaler | None = None
    stays_at: float | None = None

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch's share of the loss."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self) -> None:
        """Divide the scale out of the gradients."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        """Step the optimizer, unless gradients are not finite; then set the next scale."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update(self.stays_at)


def loss_scaler(
    setup: Setup, optimizer: Optimizer, *, device: torch.device, made: type[GradScaler] = GradScaler
) -> LossScaler:
    """What `setup.loss_scale` asks for.

    Args:
        setup: None is dynamic in float16 and none elsewhere; 0 is dynamic; any other number stays, but a step whose
            gradients are not finite is left out with it too.
        optimizer: That steps.
        device: Where the loss is.
        made: The class of scaler, of which FSDP1 has its own.
    """
    chosen = setup.loss_scale
    if chosen is None and setup.dtype != "float16":
        return LossScaler(optimizer=optimizer)
    scaler = made(device.type, init_scale=chosen or _INITIAL_SCALE)
    return LossScaler(optimizer=optimizer, scaler=scaler, stays_at=chosen or None)
