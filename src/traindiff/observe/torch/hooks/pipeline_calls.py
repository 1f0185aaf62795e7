"""Follow the stages of a pipeline, to know the micro-batch of the schedule on which each works."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

from torch import Tensor

from traindiff.core.torch_compat.training import (
    PREPARES_STAGES,
    modules_in,
    num_chunks_of,
    pipeline_classes,
    runs_backward,
    stages_of,
)
from traindiff.observe.common.listeners import Listeners
from traindiff.observe.common.progress import Chunk
from traindiff.observe.torch.hooks.context import TapContext

_CHUNK_METHODS = {
    "forward_one_chunk": {"backward": False, "again": False},
    "backward_one_chunk": {"backward": True, "again": False},
    "backward_weight_one_chunk": {"backward": True, "again": True},
}
"""Methods that a schedule calls for each micro-batch, with their kind; see `Chunk`."""


def attach(context: TapContext) -> None:
    """Follow stages of `torch.distributed.pipelining`, if it was imported, that hold the model's modules.

    The sink's `progress` is told the micro-batches on which the stages work. Passes in which a schedule finds out
    shapes before its first step are hidden from all taps. If `loss` is observed, losses are recorded on which a
    schedule does not call `backward`.

    There are no hooks for it, so the methods that schedules call for each micro-batch are replaced while at least one
    tap is attached, and restored when the last one is removed.
    """
    if pipeline_classes() is not None:
        context.undo.enter_context(_listeners.attach(_Listener(context)))


class _Listener:
    """Is told of each schedule and micro-batch."""

    def __init__(self, context: TapContext) -> None:
        self._sink = context.sink
        self._observe_loss = "loss" in context.observe
        self._ours = {id(module) for module in modules_in(context.targets.root)}
        self._count = 1
        self._events = context.events
        self.begin_schedule = self._sink.guarded("pipeline_calls", self._begin_schedule)
        self.begin_chunk = self._sink.guarded("pipeline_calls", self._begin_chunk)

    def _begin_schedule(self, schedule: Any, hidden: ExitStack) -> None:
        stages = [stage for stage in stages_of(schedule) if self._holds_ours(stage)]
        if not stages:
            return
        self._count = num_chunks_of(schedule)
        if runs_backward(schedule):
            self._events.on_schedule(schedule, stages)
            self._sink.progress.begin_schedule(num_stages=stages[0].num_stages, num_chunks=self._count)
        hidden.enter_context(self._sink.progress.hiding())

    def _begin_chunk(
        self, stage: Any, number: int, working: ExitStack, *, kind: Mapping[str, bool], loss: Tensor | None,
        part: Sequence[Tensor] | None,
    ) -> None:  # fmt: skip
        if self._holds_ours(stage):
            chunk = Chunk(
                stage=stage.stage_index, num_stages=stage.num_stages, number=number, count=self._count,
                **kind,
            )  # fmt: skip
            working.enter_context(self._sink.progress.working_on(chunk))
            if part is not None:
                working.callback(self._events.after_part)
                self._events.before_part(part)
            if loss is not None and self._observe_loss and self._sink.progress.observing:
                self._sink.emit(loss.reshape(()), phase="loss", path="loss", slot="backward", merge="sum")

    def _holds_ours(self, stage: Any) -> bool:
        return any(id(module) in self._ours for module in modules_in(stage.submod))


def _install() -> None:
    classes = pipeline_classes()
    assert classes is not None  # or nobody would have been attached
    stage, *schedules = classes
    for schedule, name in zip(schedules, PREPARES_STAGES, strict=True):
        _replace(schedule, name, _initializing)
    for name, kind in _CHUNK_METHODS.items():
        _replace(stage, name, partial(_working, kind))


_listeners: Listeners[_Listener] = Listeners(_install)


def _replace(owner: type[Any], name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    if original is None:
        return
    context = contextmanager(around)

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with context(self, *args, **kwargs):
            return original(self, *args, **kwargs)

    _listeners.replace(owner, name, method)


def _initializing(schedule: Any, *_: Any, **__: Any) -> Iterator[None]:
    with ExitStack() as hidden:
        for listener in _listeners:
            listener.begin_schedule(schedule, hidden)
        yield


def _working(
    kind: Mapping[str, bool], stage: Any, number: int, *_: Any, loss: Any = None, full_backward: bool = True, **__: Any
) -> Iterator[None]:
    # The loss of a full backward pass is seen where `backward` is called on it.
    alone = loss if isinstance(loss, Tensor) and not full_backward and not stage.is_first else None
    part = None
    if not stage.is_first and not stage.dw_builder:
        if kind["again"]:
            part = []
        elif not full_backward:
            part = [alone] if alone is not None else [*stage.fwd_cache[number][0]]
    with ExitStack() as working:
        for listener in _listeners:
            listener.begin_chunk(stage, number, working, kind=kind, loss=alone, part=part)
        yield
