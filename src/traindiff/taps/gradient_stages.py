"""Observe what is done to gradients between the backward pass and the optimizer: unscaling and clipping."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from traindiff.observation import ALL_GRADIENTS
from traindiff.taps.clipping import Clipping, ClippingListener, tap_clipping
from traindiff.taps.context import TapContext
from traindiff.taps.loss_scaler import ScalerListener, tap_loss_scaler
from traindiff.taps.numbers import as_tensor
from traindiff.taps.optimizer_step import OptimizerTap
from traindiff.taps.sink import Sink


def attach(context: TapContext) -> ExitStack:
    """Record each call that clips gradients, and where asked for, the gradients before. Close the result to end it."""
    return _GradientStages(context).attach()


class _GradientStages:
    """Records each call that clips gradients, and if asked for, gradients before they are unscaled and clipped.

    Of a call that clips, the limit and the norm that it found are recorded (phase `grad`, stage `clipped`). Gradients
    are recorded at stage `reduced`, before anything is done to them, and at stage `unscaled`, when a loss scale was
    divided out; each only before a call that changes them: without one, they are what the optimizer sees.

    """

    def __init__(self, context: TapContext) -> None:
        self._optimizers = context.optimizers
        self._names = context.names
        self._sink = context.sink
        self._observe_gradients = "grad.stages" in context.observe
        self._stages: dict[str, tuple[int, str]] = {}  # by optimizer: the step, and the next stage to be recorded

    def attach(self) -> ExitStack:
        guarded = partial(self._sink.guarded, "gradient_stages")
        with ExitStack() as undo:
            undo.enter_context(
                tap_loss_scaler(
                    ScalerListener(
                        before_unscaling=guarded(self._before_unscaling),
                        after_unscaling=guarded(self._after_unscaling),
                    )
                )
            )
            undo.enter_context(
                tap_clipping(
                    ClippingListener(before=guarded(self._before_clipping), after=guarded(self._after_clipping))
                )
            )
            return undo.pop_all()

    def _before_unscaling(self, optimizer: Optimizer) -> None:
        for tap in self._optimizers.values():
            if tap.optimizer is optimizer:
                self._record(tap)

    def _after_unscaling(self, optimizer: Optimizer) -> None:
        for tap in self._optimizers.values():
            if tap.optimizer is optimizer:
                self._next(tap, "unscaled")

    def _before_clipping(self, clipping: Clipping) -> None:
        for tap in self._concerned(clipping):
            self._record(tap)

    def _after_clipping(self, clipping: Clipping, norm: Tensor | None) -> None:
        concerned = self._concerned(clipping)
        for tap in concerned:
            self._next(tap, "")
        if (
            not any(id(parameter) in self._names for parameter in clipping.parameters)
            or not self._sink.progress.observing
        ):
            return
        optimizer = concerned[0].name if concerned else None
        emit_clipping(self._sink, norm=norm, limit=clipping.limit, optimizer=optimizer)

    def _concerned(self, clipping: Clipping) -> list[OptimizerTap]:
        held = {id(parameter) for parameter in clipping.parameters}
        return [tap for tap in self._optimizers.values() if any(id(one) in held for _, one, _ in tap.held())]

    def _record(self, tap: OptimizerTap) -> None:
        """Record gradients that a call is about to change, unless this stage of them was recorded."""
        stage = self._stage(tap)
        if stage and self._observe_gradients and self._sink.progress.observing:
            tap.gradients(stage)

    def _stage(self, tap: OptimizerTap) -> str:
        step = self._sink.progress.steps.get(tap.name, 0)
        begun, stage = self._stages.get(tap.name, (-1, ""))
        return stage if begun == step else "reduced"

    def _next(self, tap: OptimizerTap, stage: str) -> None:
        self._stages[tap.name] = self._sink.progress.steps.get(tap.name, 0), stage


def emit_clipping(sink: Sink, *, norm: float | Tensor | None, limit: float | Tensor, optimizer: str | None) -> None:
    """Record a call that clips gradients (phase `grad`, stage `clipped`).

    Args:
        sink: Receives the numbers.
        norm: Of all gradients, before; None where elements are clipped.
        limit: To which norm, or to which magnitude of an element.
        optimizer: Whose gradients; None for the one that counts the steps.
    """
    call = sink.progress.next_call(ALL_GRADIENTS, "clipped")
    emit = partial(sink.emit, phase="grad", stage="clipped", path=ALL_GRADIENTS, call=call, optimizer=optimizer)
    if norm is not None:
        _emit_norm(emit, norm)
    emit(as_tensor(limit), slot="max_value" if norm is None else "max_norm", merge="mean")


def _emit_norm(emit: Callable[..., None], norm: Any) -> None:
    """Hand on a norm; squared where each rank has that of its own part, so that they can be added up."""
    placements = getattr(norm, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        emit(as_tensor(norm.to_local() if placements else norm), slot="norm", merge="mean")
        return
    from torch.distributed.tensor import DTensor, Partial

    summed = [Partial() if placement.is_partial() else placement for placement in placements]
    squares = norm.to_local().square()
    emit(DTensor.from_local(squares, norm.device_mesh, summed, run_check=False), slot="squared_norm", merge="sum")
