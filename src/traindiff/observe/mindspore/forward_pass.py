"""Observe the inputs of the root cell and the outputs of each cell that Python calls.

MindSpore compiles its own hooks on cells together with the cell, and a hook that cannot be compiled ends the training.
So `Cell.__call__`, which compiled code does not use, is replaced here while there is a listener.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from traindiff.core.observation import NOT_CALLED
from traindiff.observe.common.batch_axis import BatchAxis
from traindiff.observe.common.containers import slots_of
from traindiff.observe.common.faults import Faults
from traindiff.observe.common.listeners import Listeners
from traindiff.observe.mindspore._mindspore_compat import records_gradients
from traindiff.observe.mindspore.observations import Observations, read


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Told of the calls of one cell. None of the functions may raise.

    Attributes:
        before: Called with the arguments, by position and by name.
        after: Called with the result of the cell.
        failed: Called instead if the cell raises.
    """

    before: Callable[[tuple[Any, ...], dict[str, Any]], None] = lambda _, __: None
    after: Callable[[Any], None] = lambda _: None
    failed: Callable[[], None] = lambda: None


def listen(listeners: Mapping[nn.Cell, Listener]) -> ExitStack:
    """Follow the calls of these cells, which the caller keeps alive. Close the result to end it."""
    return _listeners.attach({id(cell): listener for cell, listener in listeners.items()})


def _replace() -> None:
    original = nn.Cell.__call__

    @wraps(original)
    def call(cell: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        listeners = [by_id[id(cell)] for by_id in _listeners if id(cell) in by_id]
        for listener in listeners:
            listener.before(args, kwargs)
        try:
            output = original(cell, *args, **kwargs)
        except BaseException:
            for listener in reversed(listeners):
                listener.failed()
            raise
        for listener in reversed(listeners):
            listener.after(output)
        return output

    _listeners.replace(nn.Cell, "__call__", call)


_listeners: Listeners[Mapping[int, Listener]] = Listeners(_replace)
"""By id of the cell: who listens to its calls."""

FORWARD = "module_outputs"
ROOT = "root_forward"
"""Names of the taps that a fault here disables."""

COMPILED = "it runs in a graph that MindSpore has compiled, where cells cannot be seen"
SILENT = f"{NOT_CALLED}: the cell was called in compiled code, called by its construct method, or not called"


class ForwardPass:
    """Summarizes the batch and the outputs of cells.

    Args:
        cells: Selected cells by canonical path.
        root: The cell whose calls are the forward passes.
        observe: Phases that are observed.
        batch_axis: Recognizes batch axes.
        sink: Receives the observations.
        faults: Keeps errors out of the training.
        before_forward: Called before each forward pass that is differentiated.
    """

    def __init__(
        self,
        cells: Mapping[str, nn.Cell],
        root: nn.Cell,
        *,
        observe: Collection[str],
        batch_axis: BatchAxis,
        sink: Observations,
        faults: Faults,
        before_forward: Callable[[], None],
    ) -> None:
        self._cells = {path: cell for path, cell in cells.items() if _has_construct(cell)}
        self._root = root
        self._observe = observe
        self._batch_axis = batch_axis
        self._sink = sink
        self._progress = sink.progress
        self._faults = faults
        self._before_forward = before_forward
        self._running: list[AbstractContextManager[None] | None] = []
        self._heard: set[str] = set()

    def attach(self) -> ExitStack:
        """Follow the calls. Close the result to end it."""
        listeners: dict[nn.Cell, Listener] = {}
        for path, cell in self._cells.items():
            if path:
                listeners[cell] = Listener(after=partial(self._returned, path))
        listeners[self._root] = Listener(before=self._begin, after=self._end, failed=self._leave)
        return listen(listeners)

    def end_step(self) -> None:
        """Record which cells were not seen in a recorded step."""
        if self._progress.observing:
            if not self._progress.forward_done:
                self._unobserved(COMPILED, self._cells)
                if "batch" in self._observe:
                    self._sink.unobserved(COMPILED, phase="batch", path="", slot="input[0]")
            else:
                self._unobserved(SILENT, self._cells.keys() - self._heard)
        self._heard.clear()

    def _unobserved(self, reason: str, paths: Collection[str]) -> None:
        if "forward" in self._observe:
            for path in sorted(paths):
                self._sink.unobserved(reason, phase="forward", path=path, slot="output[0]")

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running.append(self._faults.run(ROOT, partial(self._enter, args, kwargs)))

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None] | None:
        if not records_gradients():
            return None
        self._before_forward()
        inputs = [*slots_of(args, "input", Tensor), *slots_of(kwargs, "input", Tensor)]
        batch = self._batch_axis.of_batch([tuple(tensor.shape) for _, tensor in inputs])
        inside = self._progress.forward(batch, evaluating=False)
        inside.__enter__()
        self._faults.run("batch", partial(self._inputs, inputs))
        return inside

    def _inputs(self, inputs: list[tuple[str, Tensor]]) -> None:
        if self._progress.observing and "batch" in self._observe:
            call = self._progress.next_call("", "inputs ")
            for slot, tensor in inputs:
                self._emit(tensor, phase="batch", path="", slot=slot, call=call)

    def _end(self, output: Any) -> None:
        if "" in self._cells:
            self._returned("", output)
        self._leave()

    def _leave(self) -> None:
        inside = self._running.pop() if self._running else None
        if inside is not None:
            inside.__exit__(None, None, None)
            self._progress.end_backward()  # not reported: the next forward pass begins the next micro-step

    def _returned(self, path: str, output: Any) -> None:
        if self._progress.observing and any(self._running) and records_gradients():
            self._heard.add(path)
            if "forward" in self._observe:
                self._faults.run(FORWARD, partial(self._output, path, output))

    def _output(self, path: str, output: Any) -> None:
        call = self._progress.next_call(path, "")
        for slot, tensor in slots_of(output, "output", Tensor):
            self._emit(tensor, phase="forward", path=path, slot=slot, call=call)

    def _emit(self, tensor: Tensor, *, phase: str, path: str, slot: str, call: int) -> None:
        site = (phase, "", path, slot, str(call))
        axis, shard = self._batch_axis.split(
            tuple(tensor.shape), path=path, slot=slot, site=site, progress=self._progress
        )
        batch = self._progress.current_batch
        # One number per micro-batch, e.g. a loss inside the model, is a term of a mean over the micro-batches.
        a_mean = not tensor.shape and batch is not None and phase == "forward"
        self._sink.emit(
            np.moveaxis(read(tensor), axis, 0) if axis else read(tensor), phase=phase, path=path, slot=slot, call=call,
            shard=shard, merge="mean" if a_mean else "shard", weight=batch.size if a_mean and batch else 1,
        )  # fmt: skip


def _has_construct(cell: nn.Cell) -> bool:
    return type(cell).construct is not nn.Cell.construct and not isinstance(cell, (nn.CellList, nn.CellDict))
