"""Observe the scale by which a loss is multiplied before `backward`, so that gradients can be divided by it."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from traindiff.observation import LOSS_SCALE
from traindiff.taps.context import TapContext
from traindiff.taps.graph_leaves import may_reach
from traindiff.taps.loss_scaler import ScalerListener, tap_loss_scaler
from traindiff.taps.nested import tensors
from traindiff.taps.numbers import as_tensor
from traindiff.taps.sink import Sink


def attach(context: TapContext) -> ExitStack:
    """Record the scale (phase `loss`, path `loss_scale`) when a scaler multiplies a loss of the model by it.

    From then on until the next step, what comes of that loss is scaled: `Progress.loss_scaled`. The scale is read
    on its device.

    Returns:
        Close it to remove the tap.
    """
    scaled = partial(_scaled, context)
    return tap_loss_scaler(ScalerListener(scaled=context.sink.guarded("loss_scale", scaled)))


def _scaled(context: TapContext, outputs: Any, scale: Tensor) -> None:
    if not may_reach([tensor for _, tensor in tensors(outputs, "")], context.leaf_ids):
        return
    emit_loss_scale(context.sink, scale)


def emit_loss_scale(sink: Sink, scale: float | Tensor) -> None:
    """Record the scale by which a loss was multiplied, and that what comes of it is scaled until the next step."""
    progress = sink.progress
    progress.loss_scaled = True
    if progress.observing:
        call = progress.next_call(LOSS_SCALE, "")
        sink.emit(as_tensor(scale), phase="loss", path=LOSS_SCALE, slot="value", call=call, merge="mean")
