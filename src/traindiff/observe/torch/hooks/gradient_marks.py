"""Notice a single bit that flips in a gradient, between a backward pass and whatever reads the gradient next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from traindiff.core.kernels.torch_arrays import is_freed
from traindiff.core.shards import Piece
from traindiff.core.torch_compat.autograd import version_of
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.marks import Edit, Together, changed_bit, emit_bit, mark_of
from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap


def attach(context: TapContext) -> None:
    """Record which bit flipped in a gradient that nothing wrote to (phase `grad`, stage `flipped`).

    Each gradient is marked after a backward pass (see `marks`), and looked at before the next one, and before an
    optimizer reads it, or something changes it. Writes through `.data` are not counted. A training that writes so
    changes more than a bit, and from then on nothing is recorded.
    """
    tap = _GradientMarks(context)
    guarded = context.sink.guarded
    context.events.after_backward.append(guarded("gradient_marks", tap.take))
    context.events.before_backward.append(guarded("gradient_marks", tap.look_again))
    context.events.on_gradients.append(guarded("gradient_marks", tap.look))


class _Marked(NamedTuple):
    """A gradient as a backward pass left it, with the number of its mark."""

    gradient: Tensor
    version: int
    number: int


class _GradientMarks:
    """Marks by id of the parameter."""

    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._marked: dict[int, _Marked] = {}
        self._marks: NDArray[np.uint8] | list[bytes | None] = []
        self._together: Together | None = None
        self._edits_unseen = False

    def take(self) -> None:
        """Mark the gradients that a backward pass has left."""
        self._marked.clear()
        self._context.uncounted_writes.parameters.clear()
        if self._edits_unseen or self._context.set_back or not self._context.sink.progress.observing:
            return
        for tap in self._context.optimizers.values():
            for parameter, _ in tap.selected():
                gradient = tap.gradient_of(parameter)
                if gradient is not None and gradient.is_floating_point() and not is_freed(gradient):
                    self._marked[id(parameter)] = _Marked(gradient, version_of(gradient), len(self._marked))
        gradients = [one.gradient for one in self._marked.values()]
        found = None if self._together is None else self._together.read(gradients)
        if found is None:  # other gradients than those of the step before
            self._together = Together.of(gradients)
            found = None if self._together is None else self._together.read(gradients)
        self._marks = [*map(mark_of, gradients)] if found is None else found

    def look_again(self, *_: Any) -> None:
        """Before the next backward pass adds to the gradients."""
        for tap in self._context.optimizers.values() if self._marked else ():
            self.look(tap, list(tap.selected()))

    def look(self, tap: OptimizerTap, held: Iterable[tuple[Tensor, Sequence[Piece]]], *_: Any) -> None:
        """Record a bit of one gradient that has flipped."""
        count = len(self._marked)
        unwritten: list[tuple[_Marked, Sequence[Piece], Tensor]] = []
        for parameter, pieces in held:
            found = self._marked.pop(id(parameter), None)
            gradient = None if found is None else tap.gradient_of(parameter)
            if found is not None and gradient is found.gradient and version_of(gradient) == found.version:
                unwritten.append((found, pieces, parameter))
        if not unwritten or (len(unwritten) == count and self._are_the_same([one.gradient for one, *_ in unwritten])):
            return
        marks = self._marks
        if not isinstance(marks, list):
            assert self._together is not None
            marks = self._marks = [*self._together.parts(marks)]
        changed: list[Edit] = []
        writes = self._context.uncounted_writes
        for marked, pieces, parameter in unwritten:
            gradient, before = marked.gradient, marks[marked.number]
            now = mark_of(gradient)
            if before is not None and now is not None and now != before:
                bit = changed_bit(gradient, before, now) if len(pieces) == 1 else None
                changed.append(Edit(gradient, pieces, bit))
                writes.parameters.add(id(parameter))
        if not changed:
            return
        writes.to_any |= len(changed) > 1
        if len(changed) > 1 or changed[0].bit is None:
            self._edits_unseen = True
            return
        emit_bit(self._context.sink, changed[0], phase="grad", slot="grad", optimizer=tap.name)

    def _are_the_same(self, gradients: Sequence[Tensor]) -> bool:
        """True if all marked gradients, read at once, have the marks that they had."""
        if isinstance(self._marks, list) or self._together is None:
            return False
        marks = self._together.read(gradients)
        return marks is not None and np.array_equal(marks, self._marks)
