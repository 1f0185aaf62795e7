"""Notice changes of an optimizer's state between its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from traindiff.core.observation import EDITED
from traindiff.core.shards import Piece
from traindiff.observe.torch.hooks.context import TapContext, emit_pieces
from traindiff.observe.torch.hooks.marks import Marks, emit_bit
from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap


def attach(context: TapContext) -> None:
    """Record the state of an optimizer as its step finds it, if something else changed it since the step before.

    Phase `optimizer`, stage `edited`. Each tensor of the state is marked after a step (see `marks`), and looked at
    before the next one: one read of the state at the speed of memory each time. If one bit of one element is another,
    and nothing wrote to the tensor, the number of the bit is recorded, too (stage `flipped`).
    """
    tap = _StateMarks(context)
    guarded = context.sink.guarded
    context.events.on_gradients.append(guarded("state_marks", tap.look))
    context.events.after_step.append(guarded("state_marks", tap.take))


class _StateMarks:
    """Marks by optimizer and slot. They count once: steps of other optimizers may follow unseen."""

    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._marks: dict[str, dict[str, Marks]] = {}
        self._count: set[str] = set()  # optimizers whose marks count

    def take(self) -> None:
        """Mark the state of all optimizers after a step that was recorded."""
        self._count.clear()
        if not self._context.sink.progress.observing or self._context.set_back:
            self._marks.clear()
            return
        for name, tap in self._context.optimizers.items():
            by_slot: dict[str, list[tuple[Tensor, Sequence[Piece]]]] = {}
            for parameter, pieces in tap.selected():
                for slot, value in _state_of(tap, parameter):
                    by_slot.setdefault(slot, []).append((value, pieces))
            before = self._marks.get(name, {})
            self._marks[name] = {slot: before.get(slot) or Marks() for slot in by_slot}
            for slot, held in by_slot.items():
                self._marks[name][slot].take_all(held)
            self._count.add(name)

    def look(self, tap: OptimizerTap, *_: Any) -> None:
        """Record what has other bits than the latest step left."""
        if tap.name not in self._count:
            return
        self._count.remove(tap.name)
        sink = self._context.sink
        for slot, marks in self._marks[tap.name].items():
            for edit in marks.edited():
                emit_pieces(
                    sink, edit.tensor, edit.pieces, phase="optimizer", slot=slot, stage=EDITED, optimizer=tap.name
                )
                emit_bit(sink, edit, phase="optimizer", slot=slot, optimizer=tap.name)
            marks.forget()


def _state_of(tap: OptimizerTap, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a parameter's state that have its size, with their slots."""
    for slot, value in tap.state_of(parameter).items():
        if isinstance(value, Tensor) and value.dim() and value.numel() == parameter.numel():
            yield slot, value
