"""Observe the losses on which `backward` is called. Their sum over a step is what it minimises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from traindiff.taps._torch_compat import inside_backward, run_as_it_is
from traindiff.taps.sink import Sink

_patched: dict[str, Callable[..., None]] = {}


def tap_backward_calls(sink: Sink, *, observe_loss: bool) -> ExitStack:
    """Follow calls of `Tensor.backward` and `torch.autograd.backward`.

    There is no hook for them, so `torch.autograd.backward` (to which `Tensor.backward` leads) is
    replaced while at least one tap is attached, and put back when the last one is removed.

    Args:
        sink: Receives each scalar root as phase `loss`, to be summed over the step: whatever the
            training divides its micro-losses by, gradients are those of this sum.
        observe_loss: Whether losses are recorded; if not, only progress is kept.

    Returns:
        Close it to remove the tap.
    """
    entry = _Listener(sink, observe_loss=observe_loss)
    _listeners.append(entry)
    if len(_listeners) == 1:
        _install()
    undo = ExitStack()
    undo.callback(_remove, entry)
    return undo


class _Listener:
    def __init__(self, sink: Sink, *, observe_loss: bool) -> None:
        self.sink = sink
        self._observe_loss = observe_loss
        self.begin = sink.guarded("loss", self._begin)
        self.end = sink.guarded("backward_calls", sink.progress.end_backward)

    def _begin(self, roots: Sequence[Tensor]) -> None:
        progress = self.sink.progress
        if not (self._observe_loss and progress.observing and progress.forward_done):
            return
        for root in roots:
            if root.numel() == 1:
                call = progress.next_call("loss", "")
                self.sink.emit(root.reshape(()), phase="loss", path="loss", slot="backward", call=call, merge="sum")


_listeners: list[_Listener] = []


def _install() -> None:
    original = torch.autograd.backward

    @wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if inside_backward():  # reentrant checkpointing: a part of the backward that is running
            original(tensors, *args, **kwargs)
            return
        listeners = list(_listeners)
        roots = [tensors] if isinstance(tensors, Tensor) else [t for t in tensors if isinstance(t, Tensor)]
        for listener in listeners:
            listener.begin(roots)
        original(tensors, *args, **kwargs)
        for listener in listeners:
            listener.end()

    run_as_it_is(backward, callees=False)
    run_as_it_is(inside_backward, callees=True)
    _patched["backward"] = original
    torch.autograd.backward = backward


def _remove(entry: _Listener) -> None:
    if entry not in _listeners:
        return
    _listeners.remove(entry)
    if not _listeners:
        torch.autograd.backward = _patched.pop("backward")
