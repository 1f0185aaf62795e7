"""Observe what the root module receives, and random state around its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from traindiff.taps.batch_axis import BatchAxis, batch_first
from traindiff.taps.nested import tensors
from traindiff.taps.sink import Sink


def tap_root_forward(
    root: nn.Module, sink: Sink, *, batch_axis: BatchAxis, observe_batch: bool, evaluation: bool,
    before_step: Callable[[], None],
) -> ExitStack:  # fmt: skip
    """Follow the root's forward passes: they delimit micro-steps and carry the batch.

    Args:
        root: The module that the training loop calls.
        sink: Receives the root's tensor inputs (phase `batch`) and the state of torch's random
            number generators before and after every forward pass.
        batch_axis: Recognises the batch axis.
        observe_batch: Whether inputs and random state are recorded; if not, only progress is kept.
        evaluation: Whether forward passes without gradients are recorded too.
        before_step: Called before the first forward pass of each step that keeps gradients.

    Returns:
        Close it to remove the tap.
    """
    progress = sink.progress
    running: list[AbstractContextManager[None]] = []

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = [*tensors(args, "input"), *tensors(kwargs, "input")]
        evaluating = not torch.is_grad_enabled()
        if not evaluating and not progress.forward_done and progress.batch is None:
            before_step()
        forward = progress.forward(batch_axis.of_batch(t for _, t in inputs), evaluating=evaluating)
        forward.__enter__()
        running.append(forward)
        if not progress.observing or not observe_batch or (evaluating and not evaluation):
            return
        stage = "evaluation" if evaluating else ""
        call = progress.next_call("", f"inputs {stage}")
        for slot, tensor in inputs:
            site = ("batch", stage, slot, str(call))
            axis, shard = batch_axis.split(tensor, path="", site=site, progress=progress)
            rows = batch_first(tensor, axis)
            sink.emit(rows, phase="batch", path="", slot=slot, stage=stage, call=call, shard=shard)
        if not evaluating:
            _emit_random_state(sink, call=call, stage="before")

    def end(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG001
        if not running:
            return  # the tap was attached in the middle of a forward pass
        training = not progress.evaluating
        running.pop().__exit__(None, None, None)
        if progress.observing and observe_batch and training:
            _emit_random_state(sink, call=progress.next_call("", "rng after"), stage="after")

    guarded = partial(sink.guarded, "root_forward")
    undo = ExitStack()
    undo.callback(root.register_forward_pre_hook(guarded(begin), with_kwargs=True, prepend=True).remove)
    undo.callback(root.register_forward_hook(guarded(end), with_kwargs=True, always_call=True).remove)
    return undo


def _emit_random_state(sink: Sink, *, call: int, stage: str) -> None:
    for device, read in _generators():
        sink.emit(read(), phase="batch", path="rng", slot=device, stage=stage, call=call)


def _generators() -> list[tuple[str, Callable[[], Tensor]]]:
    """torch's global generators: reading their state draws nothing and waits for no device."""
    found: list[tuple[str, Callable[[], Tensor]]] = [("cpu", torch.get_rng_state)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(("cuda", torch.cuda.get_rng_state))
    return found
