"""Observe the samples of each batch one by one, to find samples that differ or are in another order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from traindiff.core.observation import SAMPLE
from traindiff.observe.common.batch_axis import batch_first
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.followed_modules import Following, HeldHooks
from traindiff.observe.torch.hooks.nested import tensors

MOST = 512
"""The most samples of an input and micro-batch; no sample of a larger batch is observed."""


def attach(context: TapContext) -> None:
    """Summarize each sample of the inputs of the roots (phase `batch`, stage `sample`)."""
    progress = context.sink.progress

    def is_idle() -> bool:
        return not progress.observing

    def hook_root(path: str, root: nn.Module, hooks: HeldHooks) -> None:
        hook = context.sink.guarded("samples", partial(_inputs, context, path, ref(root)), idle=is_idle)
        hooks.before_forward(root, hook, with_kwargs=True)

    # `root_forward` records what is lost with these hooks.
    how = Following(hook=hook_root, lost=lambda *_: None, calls_follow=True)
    roots = [(context.targets.root_paths[id(root)], root) for root in context.targets.roots]
    context.undo.enter_context(context.followed.follow(roots, how))


def _inputs(
    context: TapContext,
    path: str,
    hooked: Callable[[], nn.Module | None],
    root: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    progress = context.sink.progress
    chunk = progress.chunk
    if hooked() is not root or context.other_threads.is_this():
        return
    if progress.evaluating or not torch.is_grad_enabled():
        return
    inputs = [] if chunk is not None and not chunk.is_first else list(tensors(args, "input"))
    for slot, tensor in [*inputs, *tensors(kwargs, "input")]:
        if slot not in progress.given:
            continue
        axis = context.batch_axis.axis_of_samples(tensor, progress.current_batch, path=path, slot=slot)
        if axis is not None:
            emit_samples(context.sink, batch_first(tensor, axis), path=path, slot=slot)


def emit_samples(sink: Sink, batch: Tensor, *, path: str, slot: str, micro_step: int | None = None) -> None:
    """Record the samples of a batch one by one, unless they are more than `MOST` in a micro-step, or sparse.

    Several calls of a model in one micro-step may be given parts of a batch, so they are counted on.

    Args:
        sink: Receives the observations.
        batch: One sample per entry of axis 0; any device, never changed.
        path: The path under which the batch is recorded.
        slot: The slot of the tensor there.
        micro_step: The micro-step of the batch, if it is not the current one.
    """
    if batch.layout != torch.strided or len(batch) > MOST:
        return
    with sink.together():
        for sample in batch.detach():
            number = sink.progress.next_call(f"{path} {slot} {micro_step}", SAMPLE)
            if number < MOST:
                sink.emit(sample, phase="batch", path=path, slot=slot, stage=SAMPLE, call=number, micro_step=micro_step)
