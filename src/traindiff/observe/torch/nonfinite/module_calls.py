"""Follow the calls of modules: what each takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from traindiff.core.site import ROOT, path_in_whole, printable
from traindiff.core.torch_compat.autograd import inside_backward, inside_transform
from traindiff.core.torch_compat.training import FORWARD_HOOKS, own_parameters
from traindiff.observe.torch.hooks.compiled import ModuleObserver, tap_compiled_module
from traindiff.observe.torch.hooks.followed_modules import takes_hooks
from traindiff.observe.torch.nonfinite import origin
from traindiff.observe.torch.nonfinite.calls import Call, slots, within
from traindiff.observe.torch.nonfinite.context import WatchContext
from traindiff.observe.torch.nonfinite.frames import Frame, Line
from traindiff.observe.torch.nonfinite.module_gradients import TAP, ModuleGradients
from traindiff.observe.torch.nonfinite.origin import Found
from traindiff.observe.torch.nonfinite.reading import Reading, may_mask
from traindiff.observe.torch.session.targets import Targets


class ModuleCalls:
    """The frames of the forward pass, and of the backward pass through the same calls.

    Args:
        targets: What is watched.
        context: The watch.

    Attributes:
        num_calls: Calls so far in this step.
    """

    def __init__(self, targets: Targets, context: WatchContext) -> None:
        self._targets = targets
        self._progress = context.progress
        self._reader = context.reader
        self._judging = context.judging
        self._is_meant = context.is_meant
        self._meant = context.meant
        self._early_warnings = context.early_warnings
        self._weights = context.weights
        self._order = context.order
        self._guarded = partial(context.containment.guarded, TAP)
        self._gradients = ModuleGradients(context)
        self._roots = frozenset(id(root) for root in targets.roots)
        self._running: list[Call] = []
        self._raised: list[Call] = []  # what was running when a forward pass of the root has raised
        self._root_returned = False
        self._returned: str | None = None
        self._hooks: list[tuple[str, ReferenceType[nn.Module], int]] = []
        self.num_calls = 0

    def attach(self) -> ExitStack:
        """Follow the modules. Close the result to end that."""
        with ExitStack() as undo:
            for path, module in self._targets.modules.items():
                if not takes_hooks(module):
                    continue
                site = path_in_whole(path)
                names = [*own_parameters(module)]
                paths = (printable(f"{path}.{name}" if path else name) for name in names)
                own = list(zip(map(printable, names), map(self._targets.first_name, paths), strict=True))
                before, after = self._guarded(partial(self._before, site, own)), self._guarded(self._after)
                undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                hook = module.register_forward_hook(after, with_kwargs=True)
                undo.callback(hook.remove)
                if id(module) in self._roots:
                    ended = module.register_forward_hook(self._guarded(self._root_ended), always_call=True)
                    undo.callback(ended.remove)
                self._hooks.append((site, ref(module), hook.id))
                kind = printable(type(module).__name__)
                output = self._guarded(partial(self._compiled_output, site, kind))
                gradient = self._guarded(partial(self._compiled_gradient, site, kind))
                undo.enter_context(tap_compiled_module(module, ModuleObserver(output=output, gradient=gradient)))
            undo.callback(self.let_go)
            return undo.pop_all()

    def end_step(self) -> None:
        """A step has ended."""
        self.num_calls = 0
        self._meant.clear()
        self.let_go()

    def let_go(self) -> None:
        """Forget all calls."""
        self._running.clear()
        self._raised.clear()
        self._returned = None
        self._gradients.let_go()

    @property
    def unhooked(self) -> list[str]:
        """Paths of modules of which somebody else has removed the hooks."""
        modules = ((path, reference(), number) for path, reference, number in self._hooks)
        return [path for path, one, number in modules if one is not None and number not in getattr(one, FORWARD_HOOKS)]

    def running(self) -> Iterator[Call]:
        """Calls that have begun and not ended, outermost first; an error has ended those of the last forward pass."""
        yield from self._running or self._raised

    def _count(self, path: str) -> None:
        self.num_calls += 1
        self._order[path] = self.num_calls

    def _before(
        self,
        path: str,
        own: Sequence[tuple[str, str]],
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        if not self._progress.observing or self._progress.hidden or inside_transform():
            return
        again = inside_backward()
        if not self._running and not again:
            self._returned = None
        kind, note = printable(type(module).__name__), "recomputed" if again else ""
        frame = Frame(part="forward", path=path, kind=kind, note=note)
        frame.lines += [Line(name=name, reading=self._weights[key]) for name, key in own if key in self._weights]
        call = Call(
            module=module, parent=self._running[-1] if self._running else None, behind=self._returned,
            frame=frame, arguments=(args, kwargs), random_state=torch.random.get_rng_state(),
        )  # fmt: skip
        given = self._add_lines(frame, slots(args, kwargs))
        for slot, tensor, _ in given:
            self._gradients.take(call, slot, tensor)
        self._running.append(call)
        self._count(path)
        if given and not again:
            self._judging.consider([reading for *_, reading in given], partial(self._judge_inputs, call))

    def _judge_inputs(self, call: Call) -> Found | None:
        given = {} if call.arguments is None else dict(slots(*call.arguments))
        for slot, reading, tensor in self._not_excused(call, "input", given):
            if not may_mask(reading, tensor):
                return origin.of_input(call, slot, reading, tensor, meant=self._meant)
            call.held_back.append(slot)  # scores, masked: what the module makes of them will tell
        return None

    def _after(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any  # noqa: ARG002
    ) -> None:  # fmt: skip
        self._root_returned = id(module) in self._roots
        call = None if inside_transform() else self._pop(module)
        if call is None:
            return
        call.outputs = dict(within(output, "output"))
        outputs = self._add_lines(call.frame, call.outputs.items())
        trained = [one for one in outputs if one[1].requires_grad]
        judge = (lambda: None) if call.frame.note else partial(self._judge_outputs, call)
        self._judging.consider([reading for *_, reading in outputs], judge, frame=call.frame)
        for slot, tensor, reading in trained:
            self._early_warnings.look(call.path, slot, reading, tensor, step=self._progress.step)
        self._returned = call.path
        call.finished(trained=bool(trained))
        self._gradients.follow(call, trained)

    def _root_ended(self, module: nn.Module, *_: Any) -> None:
        """A call of the root has ended; if it has not returned, it has raised."""
        returned, self._root_returned = self._root_returned, False
        if not returned:
            running = list(self._running)
            if self._pop(module) is not None:
                self._raised = running

    def _judge_outputs(self, call: Call) -> Found | None:
        for slot, reading, tensor in self._not_excused(call, "output", call.outputs):
            if not call.held_back:
                return origin.of_output(call, slot, reading)
            if not may_mask(reading, tensor):  # else masked as before: a module that changes no number
                given = call.held_back[0]
                return origin.of_input(call, given, dict(call.frame.read("input"))[given], None, meant=self._meant)
        return None

    def _not_excused(
        self, call: Call, prefix: str, values: Mapping[str, Any]
    ) -> Iterator[tuple[str, Reading, Tensor | None]]:
        """What a call takes or gives that should be finite and is not: slot, reading, and tensor if it is there."""
        for slot, reading in call.frame.read(prefix):
            site, tensor = f"{call.path or ROOT} {slot}", values.get(slot)
            if reading.is_non_finite and not self._is_meant(site, reading, tensor):
                yield slot, reading, tensor

    def _add_lines(self, frame: Frame, values: Iterable[tuple[str, Any]]) -> list[tuple[str, Tensor, Reading]]:
        """Add what a module takes or gives to its frame; gives the tensors in it, with slot and reading."""
        found = []
        for slot, value in values:
            if isinstance(value, Tensor):
                reading = self._reader.read(value)
                frame.lines.append(Line(name=slot, reading=reading))
                found.append((slot, value, reading))
            else:
                frame.lines.append(Line(name=slot, note="None" if value is None else "not a tensor"))
        return found

    def _pop(self, module: nn.Module) -> Call | None:
        """The running call of a module; calls above it have raised."""
        for position in range(len(self._running) - 1, -1, -1):
            if self._running[position].module is module:
                call = self._running[position]
                del self._running[position:]
                return call
        return None

    # In compiled code no error can be raised: what is seen there is judged when the code has returned.

    def _compiled_output(self, path: str, kind: str, tensor: Tensor, slot: str) -> None:
        if not self._progress.observing:
            return
        self._count(path)
        reading = self._reader.read_again(tensor)
        frame = Frame(part="forward", path=path, kind=kind, lines=[Line(name=slot, reading=reading)], note="compiled")
        meant = reading.is_non_finite and self._is_meant(f"{path or ROOT} {slot}", reading, tensor)
        judge: Callable[[], Found | None] = partial(origin.of_seen_output, path, slot, reading, meant=self._meant)
        self._judging.consider([reading], (lambda: None) if meant else judge, frame=frame, put_off=True)

    def _compiled_gradient(self, path: str, kind: str, tensor: Tensor, slot: str) -> None:
        if not self._progress.observing:
            return
        reading = self._reader.read_again(tensor)
        line = Line(name=f"grad {slot}", reading=reading)
        frame = Frame(part="backward", path=path, kind=kind, lines=[line], note="compiled")
        judge = partial(origin.of_seen_gradient, path, slot, reading)
        self._judging.consider([reading], judge, frame=frame, put_off=True)
