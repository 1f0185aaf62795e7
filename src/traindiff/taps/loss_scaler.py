"""Follow `GradScaler.step`, which may leave out the step of the optimizer that it was called for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from traindiff.taps._torch_compat import run_as_it_is


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listener:
    before: Callable[[Optimizer], None]
    after: Callable[[Optimizer], None] | None


_listeners: list[_Listener] = []
_patched: dict[str, Callable[..., Any]] = {}


def tap_loss_scaler(
    *, before: Callable[[Optimizer], None], after: Callable[[Optimizer], None] | None = None
) -> ExitStack:
    """Call functions around every `GradScaler.step`, with the optimizer that it was given.

    There is no hook for it, so the method is replaced while at least one tap is attached, and put back
    when the last one is removed. What a scaler decides on the device, inside a fused optimizer's own
    step, is not seen.

    Args:
        before: Called before it.
        after: Called after it, also by taps that were attached in between. Not called if it raised.

    Returns:
        Close it to remove the tap.
    """
    listener = _Listener(before=before, after=after)
    _listeners.append(listener)
    if len(_listeners) == 1:
        _install()
    undo = ExitStack()
    undo.callback(_remove, listener)
    return undo


def _install() -> None:
    original = GradScaler.step

    @wraps(original)
    def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        for listener in _listeners.copy():
            listener.before(optimizer)
        result = original(self, optimizer, *args, **kwargs)
        for listener in _listeners.copy():
            if listener.after is not None:
                listener.after(optimizer)
        return result

    run_as_it_is(step, callees=False)
    _patched["step"] = original
    GradScaler.step = step  # type: ignore[method-assign]


def _remove(listener: _Listener) -> None:
    if listener not in _listeners:
        return
    _listeners.remove(listener)
    if not _listeners:
        GradScaler.step = _patched.pop("step")  # type: ignore[method-assign]
