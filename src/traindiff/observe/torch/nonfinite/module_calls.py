"""Follow the calls of modules: what each takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from traindiff.core.site import ROOT, path_in_whole, printable
from traindiff.core.torch_compat.execution import inside_backward, inside_transform
from traindiff.core.torch_compat.training import FORWARD_HOOKS
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.compiled import ModuleObserver, tap_compiled_module
from traindiff.observe.torch.hooks.followed_modules import takes_hooks
from traindiff.observe.torch.nonfinite import origin
from traindiff.observe.torch.nonfinite.calls import Call, slots, within
from traindiff.observe.torch.nonfinite.frames import Frame, Line
from traindiff.observe.torch.nonfinite.judging import Judging, Masks
from traindiff.observe.torch.nonfinite.module_gradients import ModuleGradients
from traindiff.observe.torch.nonfinite.origin import Found
from traindiff.observe.torch.nonfinite.reading import Reader, Reading
from traindiff.observe.torch.nonfinite.signs import Signs
from traindiff.observe.torch.session.targets import Targets


class CompiledCalls:
    """Frames of outputs, and of gradients of them. They are judged when the compiled code has returned.

    Args:
        sink: Knows where the training is.
        guarded: Guards hooks.
        reader: Reads tensors.
        judging: Judges them.
        masks: What may hold -inf.
        called: Called with the path of a module that was called.
    """

    def __init__(
        self,
        *,
        sink: Sink,
        guarded: Callable[[Callable[..., None]], Callable[..., Any]],
        reader: Reader,
        judging: Judging,
        masks: Masks,
        called: Callable[[str], None],
    ) -> None:
        self._sink = sink
        self._guarded = guarded
        self._reader = reader
        self._judging = judging
        self._masks = masks
        self._called = called

    def attach(self, path: str, module: nn.Module) -> ExitStack:
        """Follow one module. Close the result to end that."""
        kind = printable(type(module).__name__)
        output, gradient = partial(self._output, path, kind), partial(self._gradient, path, kind)
        return tap_compiled_module(
            module, ModuleObserver(output=self._guarded(output), gradient=self._guarded(gradient))
        )

    def _output(self, path: str, kind: str, tensor: Tensor, slot: str) -> None:
        if not self._sink.progress.observing:
            return
        self._called(path)
        reading = self._reader.read_again(tensor)
        frame = Frame(part="forward", path=path, kind=kind, lines=[Line(name=slot, reading=reading)], note="compiled")
        masked = reading.is_non_finite and self._masks.excuse(f"{path or ROOT} {slot}", reading, tensor)
        judge: Callable[[], Found | None] = partial(origin.of_seen_output, path, slot, reading)
        self._judging.consider([reading], (lambda: None) if masked else judge, frame=frame, put_off=True)

    def _gradient(self, path: str, kind: str, tensor: Tensor, slot: str) -> None:
        if not self._sink.progress.observing:
            return
        reading = self._reader.read_again(tensor)
        line = Line(name=f"grad {slot}", reading=reading)
        frame = Frame(part="backward", path=path, kind=kind, lines=[line], note="compiled")
        judge = partial(origin.of_seen_gradient, path, slot, reading)
        self._judging.consider([reading], judge, frame=frame, put_off=True)


TAP = "module_calls"


class ModuleCalls:
    """The frames of the forward pass, and of the backward pass through the same calls.

    Args:
        targets: What is watched.
        sink: Guards hooks, and knows where the training is.
        reader: Reads tensors.
        judging: Judges them.
        masks: What may hold -inf.
        weights: What was last read of parameters, by canonical path.
        signs: Looks for early signs.
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
        signs: Signs,
        keeps_inputs: bool,
    ) -> None:
        self._targets = targets
        self._sink = sink
        self._reader = reader
        self._judging = judging
        self._masks = masks
        self._weights = weights
        self._signs = signs
        self._keeps_inputs = keeps_inputs
        self._guarded = partial(sink.guarded, TAP)
        self._gradients = ModuleGradients(
            sink=sink, guarded=self._guarded, reader=reader, judging=judging, signs=signs, keeps_inputs=keeps_inputs
        )
        self._compiled = CompiledCalls(
            sink=sink, guarded=self._guarded, reader=reader, judging=judging, masks=masks, called=self._count
        )
        self._roots = frozenset(id(root) for root in targets.roots)
        self._running: list[Call] = []
        self._raised: list[Call] = []  # what was running when a forward pass of the root has raised
        self._root_returned = False
        self._returned: str | None = None
        self._hooks: list[tuple[str, ReferenceType[nn.Module], int]] = []
        self.order: dict[str, int] = {}
        self.num_calls = 0

    def attach(self) -> ExitStack:
        """Follow the modules. Close the result to end that."""
        with ExitStack() as undo:
            for path, module in self._targets.modules.items():
                if not takes_hooks(module):
                    continue
                site = path_in_whole(path)
                names = [name for name, _ in module.named_parameters(recurse=False)]
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
                undo.enter_context(self._compiled.attach(site, module))
            undo.callback(self.let_go)
            return undo.pop_all()

    def end_step(self) -> None:
        """A step has ended."""
        self.num_calls = 0
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
        self.order[path] = self.num_calls

    def _before(
        self,
        path: str,
        own: Sequence[tuple[str, str]],
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        progress = self._sink.progress
        if not progress.observing or progress.hidden or inside_transform():
            return
        again = inside_backward()
        if not self._running and not again:
            self._returned = None
        kind = printable(type(module).__name__)
        frame = Frame(part="forward", path=path, kind=kind, note="recomputed" if again else "")
        frame.lines += [Line(name=name, reading=self._weights[key]) for name, key in own if key in self._weights]
        call = Call(
            path=path, module=module, parent=self._running[-1] if self._running else None, behind=self._returned,
            frame=frame, arguments=(args, kwargs), random_state=torch.random.get_rng_state(),
        )  # fmt: skip
        for slot, tensor in self._add_lines(frame, slots(args, kwargs)):
            self._gradients.take(call, slot, tensor)
        self._running.append(call)
        self._count(path)
        readings = [line.reading for line in frame.lines if line.reading is not None and line.is_given]
        if readings and not again:
            self._judging.consider(readings, partial(self._judge_inputs, call))

    def _judge_inputs(self, call: Call) -> Found | None:
        given = {} if call.arguments is None else dict(slots(*call.arguments))
        for line in call.frame.lines:
            reading, tensor = line.reading, given.get(line.name)
            if reading is None or not reading.is_non_finite or not line.is_given:
                continue
            if self._masks.excuse(f"{call.path or ROOT} {line.name}", reading, tensor):
                continue
            if self._masks.may_mask(reading, tensor):
                call.held_back.append(line.name)  # scores, masked: what the module makes of them will tell
                continue
            return origin.of_input(call, line.name, reading, tensor)
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
        trained = [(slot, tensor) for slot, tensor in outputs if tensor.requires_grad]
        readings = [line.reading for line in call.frame.lines if line.reading is not None and line.is_output]
        judge = (lambda: None) if call.frame.note else partial(self._judge_outputs, call)
        self._judging.consider(readings, judge, frame=call.frame)
        for slot, tensor in trained:
            self._signs.look(call.path, slot, self._reader.read(tensor), tensor, step=self._sink.progress.step)
        self._returned = call.path
        call.finished(trained=bool(trained), keeps_inputs=self._keeps_inputs)
        self._gradients.follow(call, trained)

    def _root_ended(self, module: nn.Module, *_: Any) -> None:
        """A call of the root has ended; if it has not returned, it has raised."""
        returned, self._root_returned = self._root_returned, False
        if not returned:
            running = list(self._running)
            if self._pop(module) is not None:
                self._raised = running

    def _judge_outputs(self, call: Call) -> Found | None:
        for line in call.frame.lines:
            reading, tensor = line.reading, call.outputs.get(line.name)
            if reading is None or not reading.is_non_finite or not line.is_output:
                continue
            if self._masks.excuse(f"{call.path or ROOT} {line.name}", reading, tensor):
                continue
            if call.held_back:
                if self._masks.may_mask(reading, tensor):
                    continue  # masked as before: a module that changes no number
                line = next(one for one in call.frame.lines if one.name == call.held_back[0])
                assert line.reading is not None
                return origin.of_input(call, line.name, line.reading, None)
            return origin.of_output(call, line.name, reading)
        return None

    def _add_lines(self, frame: Frame, values: Any) -> list[tuple[str, Tensor]]:
        """Add what a module takes or gives to its frame; gives the tensors in it by slot."""
        found = []
        for slot, value in values:
            if isinstance(value, Tensor):
                frame.lines.append(Line(name=slot, reading=self._reader.read(value)))
                found.append((slot, value))
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
