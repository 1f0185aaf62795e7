"""Follow gradients on their way back through the calls of modules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from traindiff.core.torch_compat.execution import version_of
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.nonfinite import origin
from traindiff.observe.torch.nonfinite.calls import Call, Recipe
from traindiff.observe.torch.nonfinite.frames import Frame, Line
from traindiff.observe.torch.nonfinite.judging import Judging
from traindiff.observe.torch.nonfinite.origin import Found
from traindiff.observe.torch.nonfinite.reading import Reader, Reading
from traindiff.observe.torch.nonfinite.signs import Signs

_IN_FLIGHT = 8
"""Calls whose inputs are kept while their backward pass runs, so that it can be captured."""

Gradients = dict[str, Tensor]
Arguments = tuple[Sequence[Any], Mapping[str, Any]]


class ModuleGradients:
    """The frames of the backward pass: gradients of outputs, and of inputs.

    Args:
        sink: Knows where the training is.
        guarded: Guards hooks.
        reader: Reads tensors.
        judging: Judges them.
        signs: Looks for early signs.
        keeps_inputs: Keep what modules are given until their backward pass, or the end of the step.
    """

    def __init__(
        self,
        *,
        sink: Sink,
        guarded: Callable[[Callable[..., None]], Callable[..., Any]],
        reader: Reader,
        judging: Judging,
        signs: Signs,
        keeps_inputs: bool,
    ) -> None:
        self._sink = sink
        self._guarded = guarded
        self._reader = reader
        self._judging = judging
        self._signs = signs
        self._keeps_inputs = keeps_inputs
        self._keeping: list[Recipe] = []
        self._made: dict[int, tuple[ReferenceType[Tensor], int, Call, str]] = {}
        self._in_flight: deque[tuple[Call, Arguments | None, Gradients]] = deque(maxlen=_IN_FLIGHT)

    def take(self, call: Call, slot: str, tensor: Tensor) -> None:
        """Note whose output a module takes; what is nobody's has its gradient followed here."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return
        maker = self._maker(tensor)
        if maker is not None:
            maker[0].takers.setdefault(maker[1], []).append((call, slot))
        elif not tensor.is_leaf:
            tensor.register_hook(self._guarded(partial(self._input_gradient, call, slot)))

    def follow(self, call: Call, outputs: Sequence[tuple[str, Tensor]]) -> None:
        """Follow the gradients of a call's outputs that have one."""
        if self._keeps_inputs and call.recipe is not None:
            self._keeping.append(call.recipe)
        for slot, tensor in outputs:
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
        for recipe in self._keeping:  # which hooks on a graph may hold, that holds their tensors
            recipe.let_go()
        self._keeping.clear()

    def _maker(self, tensor: Tensor) -> tuple[Call, str] | None:
        """The call that has returned a tensor as it is now, and the slot."""
        known = self._made.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != version_of(tensor):
            return None
        return known[2:]

    def _gradient(self, call: Call, slot: str, gradient: Tensor | None) -> None:
        if gradient is None or not self._sink.progress.observing:
            return
        reading = self._reader.read(gradient)
        progress = self._sink.progress
        self._signs.look(call.path, f"grad {slot}", reading, gradient, step=progress.step, scaled=progress.loss_scaled)
        frame = self._arrive(call, slot, gradient, reading)
        for taker, taken in call.takers.get(slot, ()):
            if taker.backward is not None:
                taker.backward.lines.append(Line(name=f"grad {taken}", reading=reading))
        self._judging.consider([reading], partial(self._judge, origin.of_gradient, call, slot, reading), frame=frame)

    def _input_gradient(self, call: Call, slot: str, gradient: Tensor | None) -> None:
        if gradient is None or not self._sink.progress.observing:
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
            for waiting, _, gradients in self._in_flight:
                if waiting is call:
                    gradients[slot] = gradient
            return None
        call.backward = Frame(part="backward", path=call.path, kind=call.kind, lines=[line])
        # Its backward pass runs next, and what autograd has kept for it lives until then.
        arguments = None if call.recipe is None else call.recipe.arguments()
        self._in_flight.append((call, arguments, {slot: gradient}))
        return call.backward

    def _judge(self, describe: Callable[[Call, str, Reading], Found], call: Call, slot: str, reading: Reading) -> Found:
        """An origin, with what the call that made it was given, where that still lives."""
        found = describe(call, slot, reading)
        for one, arguments, gradients in self._in_flight:
            if one is found.call:
                return replace(found, arguments=arguments, gradients=gradients)
        return found
