"""Observe the scale by which a loss is multiplied before `backward`, so that gradients can be divided by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from traindiff.core.observation import LOSS_SCALE
from traindiff.core.torch_compat.compiling import exclude_from_compilation
from traindiff.core.torch_compat.training import scale_of
from traindiff.observe.common.listeners import Listeners
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.backward_calls import may_reach
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.nested import as_tensor, tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerListener:
    """Is called when a scaler works.

    Attributes:
        before: Called before `step`, with the optimizer.
        after: Called after it unless it raised; also if the tap was attached in between.
        before_unscaling: Called before `unscale_`, with the optimizer; also if `step` calls that.
        after_unscaling: Called after it.
        scaled: Called after `scale`, with its result and the scale, on its device. A disabled scaler does not call it.
        scaling: Called before `scale`, with the scaler; not by a disabled one.
    """

    before: Callable[[Optimizer], None] = lambda _: None
    after: Callable[[Optimizer], None] = lambda _: None
    before_unscaling: Callable[[Optimizer], None] = lambda _: None
    after_unscaling: Callable[[Optimizer], None] = lambda _: None
    scaled: Callable[[Any, Tensor], None] = lambda *_: None
    scaling: Callable[[GradScaler], None] = lambda _: None


_running: set[tuple[int, str]] = set()


def tap_loss_scaler(listener: ScalerListener) -> ExitStack:
    """Have a listener called by every `GradScaler`, those of FSDP and of other subclasses included.

    There are no hooks for it, so the methods are replaced while at least one tap is attached, and restored when the
    last one is removed. Decisions that are made on the device, in a fused optimizer's own step, are not seen.

    Close the result to remove the tap.
    """
    return _listeners.attach(listener)


def _install() -> None:
    for kind in _kinds(GradScaler):
        for name, replacement in (("scale", _scale), ("unscale_", _unscale), ("step", _step)):
            if name in vars(kind):
                _listeners.replace(kind, name, _once(name, vars(kind)[name], replacement))


_listeners: Listeners[ScalerListener] = Listeners(_install)


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _kinds(subclass)


def _once(name: str, original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """A method in place of `original`, which calls `original` alone where a subclass's method calls its base's."""

    @wraps(original)
    def method(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        running = (id(self), name)
        if running in _running:
            return original(self, *args, **kwargs)
        _running.add(running)
        try:
            return replacement(original, self, *args, **kwargs)
        finally:
            _running.discard(running)

    exclude_from_compilation(method, callees=False)
    exclude_from_compilation(replacement, callees=False)
    return method


def _scale(original: Callable[..., Any], scaler: GradScaler, outputs: Any) -> Any:
    if scaler.is_enabled():
        for listener in _listeners:
            listener.scaling(scaler)
    scaled = original(scaler, outputs)
    if scaler.is_enabled() and (scale := scale_of(scaler)) is not None:
        for listener in _listeners:
            listener.scaled(scaled, scale)
    return scaled


def _unscale(original: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer) -> None:
    if scaler.is_enabled():
        for listener in _listeners:
            listener.before_unscaling(optimizer)
    original(scaler, optimizer)
    if scaler.is_enabled():
        for listener in _listeners:
            listener.after_unscaling(optimizer)


def _step(
    original: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any
) -> float | None:
    for listener in _listeners:
        listener.before(optimizer)
    result: float | None = original(scaler, optimizer, *args, **kwargs)
    for listener in _listeners:
        listener.after(optimizer)
    return result


def attach(context: TapContext) -> None:
    """Record the scale (phase `loss`, path `loss_scale`) when a scaler multiplies a loss of the model by it.

    From then on until the next step, everything that is computed from that loss is scaled: `Progress.loss_scaled`.
    The scale is read on its device.
    """

    def scaled(outputs: Any, scale: Tensor) -> None:
        if may_reach([tensor for _, tensor in tensors(outputs, "")], context.targets.leaf_ids):
            emit_loss_scale(context.sink, scale)

    context.undo.enter_context(tap_loss_scaler(ScalerListener(scaled=context.sink.guarded("loss_scale", scaled))))


def emit_loss_scale(sink: Sink, scale: float | Tensor) -> None:
    """Record the scale by which a loss was multiplied. Until the next step, gradients count as scaled."""
    progress = sink.progress
    progress.loss_scaled = True
    if progress.observing:
        call = progress.next_call(LOSS_SCALE, "")
        sink.emit(as_tensor(scale), phase="loss", path=LOSS_SCALE, slot="value", call=call, merge="mean")
