"""Observe the losses on which `backward` is called. Their sum over a step is what it minimises."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from traindiff.taps._torch_compat import inside_backward, run_as_it_is
from traindiff.taps.graph_leaves import may_reach
from traindiff.taps.listeners import Listeners
from traindiff.taps.sink import Sink


def tap_backward_calls(sink: Sink, parameter_ids: Collection[int], *, observe_loss: bool) -> ExitStack:
    """Follow calls of `Tensor.backward` and `torch.autograd.backward` that can reach the model's parameters.

    There is no hook for them, so `torch.autograd.backward` (to which `Tensor.backward` leads) is
    replaced while at least one tap is attached, and put back when the last one is removed.

    Args:
        sink: Receives each scalar root as phase `loss`, to be summed over the step: whatever the
            training divides its micro-losses by, gradients are those of this sum.
        parameter_ids: Ids of the model's parameters.
        observe_loss: Whether losses are recorded; if not, only progress is kept.

    Returns:
        Close it to remove the tap.
    """
    return _listeners.attach(_Listener(sink, parameter_ids, observe_loss=observe_loss))


class _Listener:
    def __init__(self, sink: Sink, parameter_ids: Collection[int], *, observe_loss: bool) -> None:
        self.sink = sink
        self._parameter_ids = parameter_ids
        self._is_concerned = True
        self._look = sink.guarded("backward_calls", self._follow)
        self._observe_loss = observe_loss
        self.begin = sink.guarded("loss", self._begin)
        self.end = sink.guarded("backward_calls", sink.progress.end_backward)

    def concerns(self, roots: Sequence[Tensor]) -> bool:
        """Whether this is a backward pass of the model, and not of another one that is trained beside it."""
        self._is_concerned = True
        self._look(roots)
        return self._is_concerned

    def _follow(self, roots: Sequence[Tensor]) -> None:
        self._is_concerned = may_reach(roots, self._parameter_ids)

    def _begin(self, roots: Sequence[Tensor]) -> None:
        progress, chunk = self.sink.progress, self.sink.progress.chunk
        if not (self._observe_loss and progress.observing and progress.forward_done):
            return
        if chunk is not None and not chunk.is_last:
            return  # this stage of a pipeline goes on from the gradients of the next
        for root in roots:
            if root.numel() == 1:
                call = progress.next_call("loss", "")
                self.sink.emit(root.reshape(()), phase="loss", path="loss", slot="backward", call=call, merge="sum")


def _install() -> None:
    original = torch.autograd.backward

    @wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if inside_backward():  # reentrant checkpointing: a part of the backward that is running
            original(tensors, *args, **kwargs)
            return
        roots = [tensors] if isinstance(tensors, Tensor) else [t for t in tensors if isinstance(t, Tensor)]
        listeners = [listener for listener in _listeners if listener.concerns(roots)]
        for listener in listeners:
            listener.begin(roots)
        original(tensors, *args, **kwargs)
        for listener in listeners:
            listener.end()

    run_as_it_is(backward, callees=False)
    run_as_it_is(inside_backward, callees=True)
    _listeners.replace(torch.autograd, "backward", backward)


_listeners: Listeners[_Listener] = Listeners(_install)
