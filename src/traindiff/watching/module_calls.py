"""Follow the calls of modules: what each takes and gives, forward and backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from traindiff.sessions.targets import Targets
from traindiff.site import path_in_whole
from traindiff.taps._torch_compat import inside_backward
from traindiff.taps.compiled import tap_compiled_module
from traindiff.taps.compiled_observers import ModuleObserver
from traindiff.taps.silent_modules import takes_hooks
from traindiff.taps.sink import Sink
from traindiff.watching import origin
from traindiff.watching.calls import Call, Recipe, slots, within
from traindiff.watching.frames import Frame, Line
from traindiff.watching.judging import Judging
from traindiff.watching.masks import Masks
from traindiff.watching.origin import Found
from traindiff.watching.reading import Reader, Reading

TAP = "module_calls"

_IN_FLIGHT = 8
"""Calls whose inputs are kept while their backward pass runs, so that it can be captured."""

Gradients = dict[str, Tensor]
Arguments = tuple[Sequence[Any], Mapping[str, Any]]


class ModuleCalls:
    """The frames of the forward and the backward pass.

    Args:
        targets: What is watched.
        sink: Guards hooks, and knows where the training is.
        reader: Reads tensors.
        judging: Judges them.
        masks: What may hold -inf.
        weights: What was last read of parameters, by canonical path.
        keeps_inputs: Keep what modules are given until their backward pass, or the end of the step.

    Attributes:
        order: How many calls had been made when a module was last called, by its path: the backward pass runs the other
            way round.
        num_calls: Calls so far in this step.
    """

    def __init__(
        self,
        targets: Targets,
        *,
        sink: Sink,
        reader: Reader,
        judging: Judging,
        masks: Masks,
        weights: Mapping[str, Reading],
        keeps_inputs: bool,
    ) -> None:
        self._targets = targets
        self._sink = sink
        self._reader = reader
        self._judging = judging
        self._masks = masks
        self._weights = weights
        self._keeps_inputs = keeps_inputs
        self._keeping: list[Recipe] = []
        self._roots = frozenset(id(root) for root in targets.roots)
        self._running: list[Call] = []
        self._returned: str | None = None
        self._made: dict[int, tuple[ReferenceType[Tensor], int, Call, str]] = {}
        self._in_flight: deque[tuple[Call, Arguments | None, Gradients]] = deque(maxlen=_IN_FLIGHT)
        self.order: dict[str, int] = {}
        self.num_calls = 0

    def attach(self) -> ExitStack:
        """Follow the modules. Close the result to end that."""
        guarded = partial(self._sink.guarded, TAP)
        with ExitStack() as undo:
            for path, module in self._targets.modules.items():
                if not takes_hooks(module):
                    continue
                site = path_in_whole(path)
                own = [(name, self._targets.first_name(f"{path}.{name}" if path else name))
                       for name, _ in module.named_parameters(recurse=False)]  # fmt: skip
                before, after = guarded(partial(self._before, site, own)), guarded(self._after)
                undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                undo.callback(module.register_forward_hook(after, with_kwargs=True).remove)
                observer = ModuleObserver(
                    output=guarded(partial(self._compiled_output, site, type(module).__name__)),
                    gradient=guarded(partial(self._compiled_gradient, site, type(module).__name__)),
                )
                undo.enter_context(tap_compiled_module(module, observer))
            undo.callback(self.let_go)
            return undo.pop_all()

    def end_step(self) -> None:
        """A step has ended."""
        self.num_calls = 0
        self.let_go()

    def let_go(self) -> None:
        """Forget all calls."""
        self._running.clear()
        self._made.clear()
        self._in_flight.clear()
        self._returned = None
        for recipe in self._keeping:  # which hooks on a graph may hold, that holds their tensors
            recipe.let_go()
        self._keeping.clear()

    def _before(
        self,
        path: str,
        own: Sequence[tuple[str, str]],
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        if not self._watches:
            return
        again = inside_backward()
        if id(module) in self._roots and not again:
            self._running.clear()  # of a forward pass that has raised
            self._returned = None
        frame = Frame(part="forward", path=path, kind=type(module).__name__, note="recomputed" if again else "")
        frame.lines += [Line(name=name, reading=self._weights[key]) for name, key in own if key in self._weights]
        call = Call(
            path=path, module=module, parent=self._running[-1] if self._running else None, behind=self._returned,
            frame=frame, arguments=(args, kwargs), random_state=torch.random.get_rng_state(),
        )  # fmt: skip
        readings = []
        for slot, value in slots(args, kwargs):
            if not isinstance(value, Tensor):
                frame.lines.append(Line(name=slot, note="None" if value is None else "not a tensor"))
                continue
            reading = self._reader.read(value)
            readings.append(reading)
            frame.lines.append(Line(name=slot, reading=reading))
            self._take(call, slot, value)
        self._running.append(call)
        self.num_calls += 1
        self.order[path] = self.num_calls
        if readings and not again:
            self._judging.consider(readings, partial(self._judge_inputs, call))

    def _judge_inputs(self, call: Call) -> Found | None:
        given = {} if call.arguments is None else {slot: one for slot, one in slots(*call.arguments)}
        for line in call.frame.lines:
            reading, tensor = line.reading, given.get(line.name)
            if reading is None or not reading.is_non_finite or not line.name.startswith("input"):
                continue
            if self._masks.excuse(f"{call.path} {line.name}", reading, tensor):
                continue
            if self._masks.may_mask(reading, tensor):
                call.held_back.append(line.name)  # scores, masked: what the module makes of them will tell
                continue
            return origin.of_input(call, line.name, reading, tensor)
        return None

    def _after(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any  # noqa: ARG002
    ) -> None:  # fmt: skip
        call = self._pop(module)
        if call is None:
            return
        found = list(within(output, "output"))
        readings = []
        for slot, value in found:
            if isinstance(value, Tensor):
                reading = self._reader.read(value)
                readings.append(reading)
                call.frame.lines.append(Line(name=slot, reading=reading))
            else:
                call.frame.lines.append(Line(name=slot, note="None" if value is None else "not a tensor"))
        again = bool(call.frame.note)
        judge = self._nothing if again else partial(self._judge_outputs, call, dict(found))
        self._judging.consider(readings, judge, frame=call.frame)
        self._returned = call.path
        trained = [(slot, one) for slot, one in found if isinstance(one, Tensor) and one.requires_grad]
        call.finished(trained=bool(trained), keeps_inputs=self._keeps_inputs)
        if call.recipe is not None and self._keeps_inputs:
            self._keeping.append(call.recipe)
        for slot, tensor in trained:
            if not tensor.is_leaf:
                tensor.register_hook(self._sink.guarded(TAP, partial(self._gradient, call, slot)))
            if self._maker(tensor) is None:  # a module that returns what one in it returned has not made it
                self._made[id(tensor)] = ref(tensor), tensor._version, call, slot

    def _judge_outputs(self, call: Call, outputs: Mapping[str, Any]) -> Found | None:
        for line in call.frame.lines:
            reading = line.reading
            if reading is None or not reading.is_non_finite or not line.name.startswith("output"):
                continue
            tensor = outputs.get(line.name)
            if self._masks.excuse(f"{call.path} {line.name}", reading, tensor):
                continue
            if call.held_back:
                if self._masks.may_mask(reading, tensor):
                    continue  # masked as before: a module that changes no number
                line = next(one for one in call.frame.lines if one.name == call.held_back[0])
                assert line.reading is not None
                return origin.of_input(call, line.name, line.reading, None)
            return origin.of_output(call, line.name, reading)
        return None

    def _take(self, call: Call, slot: str, tensor: Tensor) -> None:
        """Note whose output a module takes; what is nobody's has its gradient followed here."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return
        maker = self._maker(tensor)
        if maker is not None:
            maker[0].takers.setdefault(maker[1], []).append((call, slot))
        elif not tensor.is_leaf:
            tensor.register_hook(self._sink.guarded(TAP, partial(self._input_gradient, call, slot)))

    def _maker(self, tensor: Tensor) -> tuple[Call, str] | None:
        """The call that has returned a tensor as it is now, and the slot."""
        known = self._made.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != tensor._version:
            return None
        return known[2:]

    def _gradient(self, call: Call, slot: str, gradient: Tensor | None) -> None:
        if gradient is None or not self._watches:
            return
        reading = self._reader.read(gradient)
        frame = self._arrive(call, slot, gradient, reading)
        for taker, taken in call.takers.get(slot, ()):
            if taker.backward is not None:
                taker.backward.lines.append(Line(name=f"grad {taken}", reading=reading))
        self._judging.consider([reading], partial(self._judge_gradient, call, slot, reading), frame=frame)

    def _judge_gradient(self, call: Call, slot: str, reading: Reading) -> Found:
        return self._with_inputs(origin.of_gradient(call, slot, reading))

    def _input_gradient(self, call: Call, slot: str, gradient: Tensor | None) -> None:
        if gradient is None or not self._watches:
            return
        reading = self._reader.read(gradient)
        if call.backward is not None:
            call.backward.lines.append(Line(name=f"grad {slot}", reading=reading))
        self._judging.consider([reading], lambda: self._with_inputs(origin.of_input_gradient(call, slot, reading)))

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

    def _with_inputs(self, found: Found) -> Found:
        """An origin in the backward pass with what the call was given, where that still lives."""
        for call, arguments, gradients in self._in_flight:
            if call is found.call:
                return Found(
                    phase=found.phase, path=found.path, slot=found.slot, says=found.says, call=call,
                    arguments=arguments, gradients=gradients,
                )  # fmt: skip
        return found

    def _compiled_output(self, path: str, kind: str, tensor: Tensor, slot: str) -> None:
        if not self._watches:
            return
        self.num_calls += 1
        self.order[path] = self.num_calls
        reading = self._reader.read_again(tensor)
        frame = Frame(part="forward", path=path, kind=kind, lines=[Line(name=slot, reading=reading)], note="compiled")
        masked = self._masks.excuse(f"{path} {slot}", reading, tensor) if reading.is_non_finite else False
        judge = self._nothing if masked else partial(origin.of_seen_output, path, slot, reading)
        self._judging.consider([reading], judge, frame=frame, put_off=True)

    def _compiled_gradient(self, path: str, kind: str, tensor: Tensor, slot: str) -> None:
        if not self._watches:
            return
        reading = self._reader.read_again(tensor)
        line = Line(name=f"grad {slot}", reading=reading)
        frame = Frame(part="backward", path=path, kind=kind, lines=[line], note="compiled")
        says = f"The gradient that comes back to {path} {slot} in compiled code is not finite; those before it are."
        found = Found(phase="backward", path=path, slot=f"grad {slot}", says=says)
        self._judging.consider([reading], lambda: found, frame=frame, put_off=True)

    @staticmethod
    def _nothing() -> None:
        return None

    @property
    def _watches(self) -> bool:
        return self._sink.progress.observing and not self._sink.progress.hidden

    def _pop(self, module: nn.Module) -> Call | None:
        """The running call of a module; calls above it have raised."""
        for position in range(len(self._running) - 1, -1, -1):
            if self._running[position].module is module:
                call = self._running[position]
                del self._running[position:]
                return call
        return None

    def running(self) -> Iterator[Call]:
        """Calls that have begun and not ended, outermost first."""
        yield from self._running
