"""Observe how gradients change between the backward pass and the optimizer: unscaling and clipping."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from traindiff.core.observation import ALL_GRADIENTS
from traindiff.core.torch_compat.compiling import exclude_from_compilation
from traindiff.core.torch_compat.training import CLIPS_WITH_NORM, parameters_in
from traindiff.observe.common.listeners import Listeners
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.loss_scale import ScalerListener, tap_loss_scaler
from traindiff.observe.torch.hooks.nested import as_tensor
from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap

_depth = [0]


def _install() -> None:
    utils: Any = torch.nn.utils
    if hasattr(utils.clip_grad, CLIPS_WITH_NORM):
        # `clip_grad_norm_` calls the first name; the second is the public name of the same function.
        _replace(utils.clip_grad, CLIPS_WITH_NORM, _with_norm)
        _replace(utils, "clip_grads_with_norm_", _with_norm)
    else:
        _replace(utils.clip_grad, "clip_grad_norm_", _norm)
        _replace(utils, "clip_grad_norm_", _norm)
    _replace(utils.clip_grad, "clip_grad_value_", _value)
    _replace(utils, "clip_grad_value_", _value)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        _replace(fsdp.FullyShardedDataParallel, "clip_grad_norm_", _of_fsdp)
    deepspeed = sys.modules.get("deepspeed.runtime.engine")
    if deepspeed is not None:
        _replace(deepspeed, "clip_grad_norm_", _norm)  # it has its own, without ZeRO in float32


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = vars(owner)[name]

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if _depth[0]:  # it is a part of the call that is running
            return original(*args, **kwargs)
        _depth[0] += 1
        try:
            return replacement(original, *args, **kwargs)
        finally:
            _depth[0] -= 1

    exclude_from_compilation(function, callees=False)
    exclude_from_compilation(replacement, callees=False)
    _listeners.replace(owner, name, function)


_listeners: Listeners[_GradientStages] = Listeners(_install)


def _with_norm(
    original: Callable[..., Any], parameters: Any, max_norm: Any, total_norm: Tensor, *rest: Any, **named: Any
) -> Any:
    clipped = _listed(parameters)
    call = partial(original, clipped, max_norm, total_norm, *rest, **named)
    return _followed(clipped, max_norm, call, norm_of=lambda _: total_norm)


def _norm(original: Callable[..., Any], parameters: Any, max_norm: Any, *rest: Any, **named: Any) -> Any:
    clipped = _listed(parameters)
    return _followed(clipped, max_norm, partial(original, clipped, max_norm, *rest, **named))


def _of_fsdp(original: Callable[..., Any], module: Any, max_norm: Any, *rest: Any, **named: Any) -> Any:
    return _followed(list(parameters_in(module)), max_norm, partial(original, module, max_norm, *rest, **named))


def _value(original: Callable[..., Any], parameters: Any, clip_value: float, *rest: Any, **named: Any) -> Any:
    clipped = _listed(parameters)
    call = partial(original, clipped, clip_value, *rest, **named)
    return _followed(clipped, clip_value, call, norm_of=lambda _: None)


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)  # it may be a generator


def _followed(
    clipped: Sequence[Tensor],
    limit: float | Tensor,
    call: Callable[[], Any],
    *,
    norm_of: Callable[[Any], Tensor | None] = lambda result: result,
) -> Any:
    """Call a function that clips the gradients of some parameters to a limit, and the listeners around it.

    `norm_of` finds the norm in the function's result; None if it clips elements, not the norm of all together.
    """
    for listener in _listeners:
        listener.before_clipping(clipped)
    result = call()
    for listener in _listeners:
        listener.after_clipping(clipped, limit, norm_of(result))
    return result


def attach(context: TapContext) -> None:
    """Record each call that clips gradients, and on request the gradients before.

    There are no hooks for clipping, so the functions are replaced while at least one tap is attached, and restored when
    the last one is removed. Since torch 2.6, `clip_grad_norm_` is followed where it multiplies the gradients, wherever
    a training has imported it from; `clip_grad_value_` only if it is called as an attribute of `torch.nn.utils`.
    """
    stages = _GradientStages(context)
    context.undo.enter_context(tap_loss_scaler(stages.scaler))
    context.undo.enter_context(_listeners.attach(stages))


class _GradientStages:
    """Records calls that clip gradients, and on request the gradients before they are unscaled and clipped.

    A call that clips is recorded by its limit and the norm that it found (phase `grad`, stage `clipped`). Gradients are
    recorded at stage `reduced`, before they change at all, and at stage `unscaled`, when a loss scale was divided out;
    each only before a call that changes them. Without such a call the optimizer sees the same gradients.
    """

    def __init__(self, context: TapContext) -> None:
        guarded = partial(context.sink.guarded, "gradient_stages")
        self._optimizers = context.optimizers
        self._on_clipping = context.events.on_clipping
        self._names = context.targets.names
        self._sink = context.sink
        self._stages: dict[str, tuple[int, str]] = {}  # by optimizer: the step, and the next stage to be recorded
        self.scaler = ScalerListener(
            before_unscaling=guarded(self._before_unscaling), after_unscaling=guarded(self._after_unscaling)
        )
        self.before_clipping = guarded(self._before_clipping)
        self.after_clipping = guarded(self._after_clipping)

    def _before_unscaling(self, optimizer: Optimizer) -> None:
        for tap in self._optimizers.values():
            if tap.optimizer is optimizer:
                self._record(tap)

    def _after_unscaling(self, optimizer: Optimizer) -> None:
        for tap in self._optimizers.values():
            if tap.optimizer is optimizer:
                self._next(tap, "unscaled")

    def _before_clipping(self, clipped: Sequence[Tensor]) -> None:
        self._on_clipping(clipped)
        for tap in self._concerned(clipped):
            self._record(tap)

    def _after_clipping(self, clipped: Sequence[Tensor], limit: float | Tensor, norm: Tensor | None) -> None:
        concerned = self._concerned(clipped)
        for tap in concerned:
            self._next(tap, "")
        if self._sink.progress.observing and any(id(parameter) in self._names for parameter in clipped):
            optimizer = concerned[0].name if concerned else None
            emit_clipping(self._sink, norm=norm, limit=limit, optimizer=optimizer)

    def _concerned(self, clipped: Sequence[Tensor]) -> list[OptimizerTap]:
        ids = {id(parameter) for parameter in clipped}
        return [tap for tap in self._optimizers.values() if any(id(one) in ids for _, one, _ in tap.held())]

    def _record(self, tap: OptimizerTap) -> None:
        """Record gradients that a call is about to change, unless their stage was recorded already."""
        stage = self._stage(tap)
        if stage and self._sink.progress.observing:
            tap.gradients(stage)

    def _stage(self, tap: OptimizerTap) -> str:
        step = self._sink.progress.number_of(tap.name)
        begun, stage = self._stages.get(tap.name, (-1, ""))
        return stage if begun == step else "reduced"

    def _next(self, tap: OptimizerTap, stage: str) -> None:
        self._stages[tap.name] = self._sink.progress.number_of(tap.name), stage


def emit_clipping(sink: Sink, *, norm: float | Tensor | None, limit: float | Tensor, optimizer: str | None) -> None:
    """Record a call that clips gradients (phase `grad`, stage `clipped`).

    Args:
        sink: Receives the numbers.
        norm: The norm of all gradients before; None if elements are clipped.
        limit: The largest norm, or the largest magnitude of an element.
        optimizer: The optimizer of the gradients, by name; None for the one that counts the steps.
    """
    call = sink.progress.next_call(ALL_GRADIENTS, "clipped")
    emit = partial(sink.emit, phase="grad", stage="clipped", path=ALL_GRADIENTS, call=call, optimizer=optimizer)
    if norm is not None:
        _emit_norm(emit, norm)
    emit(as_tensor(limit), slot="max_value" if norm is None else "max_norm", merge="mean")


def _emit_norm(emit: Callable[..., Any], norm: Any) -> None:
    """Record a norm; squared if each rank has the norm of its own part, so that ranks can be added up."""
    placements = getattr(norm, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        emit(as_tensor(norm.to_local() if placements else norm), slot="norm", merge="mean")
        return
    from torch.distributed.tensor import DTensor, Partial

    summed = [Partial() if placement.is_partial() else placement for placement in placements]
    squares = norm.to_local().square()
    emit(DTensor.from_local(squares, norm.device_mesh, summed, run_check=False), slot="squared_norm", merge="sum")
