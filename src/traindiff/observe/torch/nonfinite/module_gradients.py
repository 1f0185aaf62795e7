"""Follow gradients on their way back through the calls of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from traindiff.core.torch_compat.autograd import version_of
from traindiff.observe.torch.hooks.swapped_tensors import HoldsTensors
from traindiff.observe.torch.nonfinite import origin
from traindiff.observe.torch.nonfinite.calls import Arguments, Call
from traindiff.observe.torch.nonfinite.context import WatchContext
from traindiff.observe.torch.nonfinite.frames import Frame, Line
from traindiff.observe.torch.nonfinite.origin import Found
from traindiff.observe.torch.nonfinite.reading import Reading

TAP = "module_calls"
"""Name of the tap that a fault in a hook on modules, or on their gradients, disables."""

_IN_FLIGHT = 8
"""Calls whose inputs are kept while their backward pass runs, so that it can be captured."""

Gradients = dict[str, Tensor]


class ModuleGradients(HoldsTensors):
    """The frames of the backward pass: gradients of outputs, and of inputs.

    Args:
        context: The watch.
    """

    def __init__(self, context: WatchContext) -> None:
        super().__init__()
        self._progress = context.progress
        self._reader = context.reader
        self._judging = context.judging
        self._early_warnings = context.early_warnings
        self._keeps_inputs = context.keeps_inputs
        self._guarded = partial(context.containment.guarded, TAP)
        self._kept: list[Arguments | None] = []
        self._made: dict[int, tuple[ReferenceType[Tensor], int, Call, str]] = {}
        self._in_flight: dict[Call, tuple[Arguments | None, Gradients]] = {}

    def forget_tensors(self) -> None:
        """See `HoldsTensors`."""
        self._made.clear()

    def take(self, call: Call, slot: str, tensor: Tensor) -> None:
        """Note whose output a module takes; what is nobody's has its gradient followed here."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return
        maker = self._maker(tensor)
        if maker is not None:
            maker[0].takers.setdefault(maker[1], []).append((call, slot))
        elif not tensor.is_leaf:
            tensor.register_hook(self._guarded(partial(self._input_gradient, call, slot)))

    def follow(self, call: Call, outputs: Iterable[tuple[str, Tensor, Reading]]) -> None:
        """Follow the gradients of a call's outputs that have one."""
        if self._keeps_inputs and call.recall is not None:
            self._kept.append(call.recall())
        for slot, tensor, _ in outputs:
            if not tensor.is_leaf:
                tensor.register_hook(self._guarded(partial(self._gradient, call, slot)))
            maker = self._maker(tensor)
            if maker is None:
                self._made[id(tensor)] = ref(tensor), version_of(tensor), call, slot
            else:  # a module that returns what one in it returned has not made it
                maker[0].passed_on[maker[1]] = call

    def let_go(self) -> None:
        """Forget all calls."""
        self._made.clear()
        self._in_flight.clear()
        self._kept.clear()

    def _maker(self, tensor: Tensor) -> tuple[Call, str] | None:
        """The call that has returned a tensor as it is now, and the slot."""
        known = self._made.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != version_of(tensor):
            return None
        return known[2:]

    def _gradient(self, call: Call, slot: str, gradient: Tensor | None) -> None:
        if gradient is None or not self._progress.observing:
            return
        reading, progress = self._reader.read(gradient), self._progress
        self._early_warnings.look(
            call.path, f"grad {slot}", reading, gradient, step=progress.step, scaled=progress.loss_scaled
        )
        frame = self._arrive(call, slot, gradient, reading)
        for taker, taken in call.takers.get(slot, ()):
            if taker.backward is not None:
                taker.backward.lines.append(Line(name=f"grad {taken}", reading=reading))
        self._judging.consider([reading], partial(self._judge, origin.of_gradient, call, slot, reading), frame=frame)

    def _input_gradient(self, call: Call, slot: str, gradient: Tensor | None) -> None:
        if gradient is None or not self._progress.observing:
            return
        reading = self._reader.read(gradient)
        if call.backward is not None:
            call.backward.lines.append(Line(name=f"grad {slot}", reading=reading))
        self._judging.consider([reading], partial(self._judge, origin.of_input_gradient, call, slot, reading))

    def _arrive(self, call: Call, slot: str, gradient: Tensor, reading: Reading) -> Frame | None:
        """A gradient has come back to a call; gives its frame if this is the first."""
        line = Line(name=f"grad {slot}", reading=reading)
        if call.backward is not None:
            call.backward.lines.append(line)
            if call in self._in_flight:
                self._in_flight[call][1][slot] = gradient
            return None
        call.backward = Frame(part="backward", path=call.path, kind=call.kind, lines=[line])
        # Its backward pass runs next, and what autograd has kept for it lives until then.
        arguments = None if call.recall is None else call.recall()
        self._in_flight[call] = arguments, {slot: gradient}
        if len(self._in_flight) > _IN_FLIGHT:
            del self._in_flight[next(iter(self._in_flight))]
        return call.backward

    def _judge(self, describe: Callable[[Call, str, Reading], Found], call: Call, slot: str, reading: Reading) -> Found:
        """An origin, with what the call that made it was given, where that still lives."""
        found = describe(call, slot, reading)
        if found.call not in self._in_flight:
            return found
        arguments, gradients = self._in_flight[found.call]
        return replace(found, arguments=arguments, gradients=gradients)
