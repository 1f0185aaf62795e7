"""Notice changes of an optimizer's state between its steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from traindiff.core.observation import EDITED
from traindiff.observe.torch.hooks.context import TapContext, emit_pieces
from traindiff.observe.torch.hooks.marks import Marks, mark_of
from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap


def attach(context: TapContext) -> None:
    """Record the state of an optimizer as its step finds it, if something else changed it since the step before.

    Phase `optimizer`, stage `edited`. Each tensor of the state is marked after a step (see `marks`), and looked at
    before the next one. The mark is taken right after the tensor was summarized, while it is in the cache; the look
    reads the state once at the speed of memory.
    """
    tap = _StateMarks(context)
    guarded = context.sink.guarded
    context.events.on_gradients.append(guarded("state_marks", tap.look))
    context.events.on_stepped.append(guarded("state_marks", tap.mark))
    context.events.after_step.append(guarded("state_marks", tap.take))


class _StateMarks:
    """Marks by optimizer and slot. They count once: steps of other optimizers may follow unseen."""

    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._marks: dict[str, dict[str, Marks]] = {}
        self._fresh: dict[int, tuple[Tensor, bytes | None]] = {}  # marks of the step that ends, by id of the tensor

    def mark(self, tap: OptimizerTap, parameter: Tensor) -> None:
        """Mark the state of a parameter, which has just been read."""
        if not self._context.set_back:
            for _, value in _state_of(tap, parameter):
                self._fresh[id(value)] = value, mark_of(value)

    def take(self) -> None:
        """Keep the marks of all optimizers after a step that was recorded."""
        fresh, self._fresh = self._fresh, {}
        self._marks.clear()
        if not self._context.sink.progress.observing or self._context.set_back:
            return
        for name, tap in self._context.optimizers.items():
            by_slot = self._marks[name] = {}
            for parameter, pieces in tap.selected():
                for slot, value in _state_of(tap, parameter):
                    _, mark = fresh.get(id(value), (None, None))
                    by_slot.setdefault(slot, Marks()).take(value, pieces, mark)

    def look(self, tap: OptimizerTap, *_: Any) -> None:
        """Record what has other bits than the latest step left."""
        sink = self._context.sink
        for slot, marks in self._marks.pop(tap.name, {}).items():
            for tensor, pieces in marks.edited():
                emit_pieces(sink, tensor, pieces, phase="optimizer", slot=slot, stage=EDITED, optimizer=tap.name)


def _state_of(tap: OptimizerTap, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a parameter's state that have its size, with their slots."""
    for slot, value in tap.state_of(parameter).items():
        if isinstance(value, Tensor) and value.dim() and value.numel() == parameter.numel():
            yield slot, value
