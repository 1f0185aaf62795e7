"""Observe the batches that data loaders yield, before other code changes them on the way to the model."""

from __future__ import annotations

import os
import threading
from functools import wraps
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from traindiff.core.kernels.torch_arrays import shape_of
from traindiff.core.torch_compat.compiling import exclude_from_compilation
from traindiff.core.torch_compat.training import index_sampler_of, loader_iterators
from traindiff.observe.common.batch_axis import batch_first
from traindiff.observe.common.listeners import Listeners
from traindiff.observe.common.progress import Batch
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.nested import tensors
from traindiff.observe.torch.hooks.samples import emit_samples

PATH = "dataloader"
"""Path of the loader that the training used first; the next ones are `dataloader[1]`, `dataloader[2]`, ..."""

LOADED = "loaded"
"""Stage of a whole batch as it was yielded."""

NO_TENSOR = "no tensor was found in what it yields"
ELSEWHERE = "it is iterated over by another thread: what it yields belongs to no step yet"


def attach(context: TapContext) -> None:
    """Record the batches of every `torch.utils.data.DataLoader` of this process (phase `batch`, stage `loaded`).

    A batch belongs to the step and micro-step of the next forward pass after the training *receives* it. The tap does
    not see batches that workers have prefetched before that. If a training asks for a batch early, to copy it to the
    device meanwhile, the batch is recorded one step earlier here than at the root. If gradients are disabled when a
    batch is received, the batch is for evaluation, and is not recorded. Axis 0 is the batch axis unless `batch_axis`
    declares another.

    PyTorch has no hook for this. So the tap replaces the method that yields, also for iterators that exist already. It
    restores the method when the last tap is removed. No batch is kept.
    """
    tap = _Loaders(context)
    context.events.after_step.append(context.sink.guarded("dataloader", tap.say_elsewhere))
    context.undo.enter_context(_listeners.attach(context.sink.guarded("dataloader", tap.yielded)))


class _Moment(NamedTuple):
    """The number of batches that a loader has yielded in a micro-step."""

    step: int = 0
    micro_step: int = 0
    calls: int = 0


class _Loaders:
    def __init__(self, context: TapContext) -> None:
        self._sink = context.sink
        self._batch_axis = context.batch_axis
        self._here = os.getpid(), threading.get_ident()
        self._paths: dict[int, tuple[str, ReferenceType[Any] | None]] = {}
        self._count = 0
        self._moments: dict[str, _Moment] = {}
        self._elsewhere: dict[str, bool] = {}  # by path: True once it was recorded

    def yielded(self, iterator: Any, batch: Any) -> None:
        """Record a batch that an iterator yields to the training."""
        process, thread = self._here
        if os.getpid() != process or not torch.is_grad_enabled():
            return  # in a worker whose data set has a loader of its own, or for evaluation
        path, progress = self._path(index_sampler_of(iterator)), self._sink.progress
        if threading.get_ident() != thread:
            self._elsewhere.setdefault(path, False)
        elif progress.observing and not progress.hidden:
            self._record(path, list(tensors(batch, "batch")))

    def say_elsewhere(self) -> None:
        """Record which loaders could not be followed; once, and on the thread of the training."""
        for path, said in list(self._elsewhere.items()):
            if not said and self._sink.progress.observing:
                self._elsewhere[path] = True
                self._sink.unobserved(ELSEWHERE, phase="batch", path=path, slot="batch", stage=LOADED)

    def _record(self, path: str, found: list[tuple[str, Tensor]]) -> None:
        progress, call = self._sink.progress, self._call(path)
        micro_step = self._moments[path].micro_step
        if not found and not call:
            self._sink.unobserved(NO_TENSOR, phase="batch", path=path, slot="batch", stage=LOADED)
        batch = self._batch_axis.of_batch((shape_of(tensor) for _, tensor in found), path=path, slot="batch")
        for slot, tensor in found:
            site = ("batch", LOADED, path, slot, str(call))
            axis, shard = self._batch_axis.split(
                shape_of(tensor), path=path, slot=slot, site=site, progress=progress, batch=batch or _NO_BATCH
            )
            rows = batch_first(tensor, axis)
            self._sink.emit(
                rows, phase="batch", path=path, slot=slot, stage=LOADED, call=call, micro_step=micro_step, shard=shard
            )
            of_samples = self._batch_axis.axis_of_samples(tensor, batch, path=path, slot=slot)
            if of_samples is not None and not call and tensor.layout == torch.strided:
                emit_samples(self._sink, batch_first(tensor, of_samples), path=path, slot=slot, micro_step=micro_step)

    def _call(self, path: str) -> int:
        """The number of earlier batches of the loader in the micro-step whose forward pass comes next."""
        progress = self._sink.progress
        step, micro_step = progress.step, progress.micro_step + progress.backward_done
        before = self._moments.get(path, _Moment())
        call = before.calls if before[:2] == (step, micro_step) else 0
        self._moments[path] = _Moment(step, micro_step, call + 1)
        return call

    def _path(self, drawing: Any) -> str:
        """The path of the loader that draws its indices from this sampler."""
        path, held = self._paths.get(id(drawing), ("", None))
        if not path or (held is not None and held() is not drawing):
            path = f"{PATH}[{self._count}]" if self._count else PATH
            self._count += 1
            try:
                held = ref(drawing)
            except TypeError:  # e.g. a list of batches
                held = None
            self._paths[id(drawing)] = path, held
        return path


_NO_BATCH = Batch(size=0, lengths=frozenset())


def _install() -> None:
    kind = loader_iterators()
    original = kind.__next__

    @wraps(original)
    def following(iterator: Any) -> Any:
        batch = original(iterator)
        for listener in _listeners:
            listener(iterator, batch)
        return batch

    exclude_from_compilation(following, callees=False)
    _listeners.replace(kind, "__next__", following)


_listeners: Listeners[Any] = Listeners(_install)
