"""Observe what each micro-batch contributes to the gradients of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from torch import Tensor, nn

from traindiff.taps.sink import Sink
from traindiff.taps.sparse_gradients import as_dense


def tap_parameter_gradients(parameters: Mapping[str, nn.Parameter], sink: Sink) -> ExitStack:
    """Summarise each contribution before it is added to `.grad` (phase `grad`, stage `micro`).

    Contributions are terms of a sum. What the optimizer later sees can be held against that sum,
    which shows a contribution that was lost, doubled or scaled on the way.

    Args:
        parameters: By canonical path; those that need no gradient are passed over.
        sink: Receives the observations.

    Returns:
        Close it to remove the tap.
    """
    with ExitStack() as undo:
        for path, parameter in parameters.items():
            if parameter.requires_grad:
                hook = sink.guarded("parameter_gradients", partial(_contribution, sink, path))
                undo.callback(parameter.register_hook(hook).remove)
        return undo.pop_all()


def _contribution(sink: Sink, path: str, gradient: Tensor) -> None:
    if sink.progress.observing:
        call = sink.progress.next_call(path, "micro")
        sink.emit(as_dense(gradient), phase="grad", path=path, slot="grad", stage="micro", call=call, merge="sum")
