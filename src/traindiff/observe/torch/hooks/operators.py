"""Observe every operator inside chosen modules, forward and backward: its inputs and outputs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from traindiff.core.kernels.torch_arrays import is_abstract
from traindiff.core.observation import OPERATOR, RECOMPUTED_OPERATOR, UNSEEN
from traindiff.core.site import ROOT, path_in_whole
from traindiff.core.torch_compat.execution import TorchDispatchMode, hide_dispatch_mode, inside_backward, running_node
from traindiff.observe.torch.hooks.backward_calls import nodes_of
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.followed_modules import Following, HeldHooks, takes_hooks
from traindiff.observe.torch.hooks.operator_calls import (
    GraphNodes,
    Made,
    ModuleCall,
    Schema,
    UndefinedMemory,
    called_from,
    inputs_of,
    outputs_of,
    schema_of,
    settings_of,
)
from traindiff.observe.torch.hooks.out_of_sight import enter_mode, leave_mode

MOST_DESCRIBED_BYTES = 40_000_000
"""Size of the sources and settings of operators that are kept, as JSON: readers refuse a larger `rank.json`."""

_FRAME_BYTES = 250
"""Size of an operator in there beside its texts: keys, indentation."""

UNDEFINED = "it holds whatever was in memory: nothing was written to it yet"


def attach(context: TapContext) -> None:
    """Observe operators in the modules that were chosen for it (phases `forward` and `backward`, stage `operator`).

    A `TorchDispatchMode` sees each operator below autograd. It is on only inside these modules, and during the
    backward pass of a step in which one of them was called. There it asks autograd for the node that runs, and the
    number of the node tells which module's forward pass made it. So nothing is hooked to the graph, and operators of a
    `torch.autograd.Function`, or of activation checkpointing, are seen like all others.
    """
    _Operators(context).attach()


class _Running(NamedTuple):
    schema: Schema
    phase: str
    path: str
    inside: ModuleCall


class _Operators:
    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._sink = context.sink
        self._mode = _Mode(self)
        self._is_on = False
        self._in_backward = False
        self._calls: list[tuple[nn.Module, ModuleCall]] = []
        self._thread = 0  # the thread of the outermost of these calls
        self._without_mode: list[Any] = []  # handles of the hooks of the backward pass that is running
        self._nodes = GraphNodes()
        self._memory = UndefinedMemory()
        self._described: dict[str, dict[str, Any]] = {}
        self._described_bytes = 0
        self._is_written = True
        self.begin = context.sink.altering("operators", self._begin)
        self.end = context.sink.guarded("operators", self._end)

    def attach(self) -> None:
        guarded, events = partial(self._sink.guarded, "operators"), self._context.events
        events.before_forward.append(guarded(self._begin_forward))
        for event in (events.after_step, events.at_end):
            event.append(guarded(self._end_step))
        events.before_backward.append(guarded(self._begin_backward))
        events.after_backward.append(self._context.containment.guarded("operators", self._end_backward, always=True))
        undo, zoomed = self._context.undo, self._context.targets.zoomed
        undo.callback(self._let_go)
        taking = {path: module for path, module in zoomed.items() if takes_hooks(module)}
        for path in [path for path in zoomed if path not in taking]:
            why = "TorchScript takes no hooks on modules"
            self._sink.unobserved(why, phase="forward", path=path, slot="output[0]", stage=OPERATOR)
        undo.enter_context(self._context.followed.follow(taking.items(), Following(hook=self._hook, lost=self._lost)))

    def _hook(self, path: str, module: nn.Module, hooks: HeldHooks) -> None:
        hooks.before_forward(module, self._sink.guarded("operators", partial(self._enter, path_in_whole(path))))
        # First, so that operators of other hooks on the output are not taken for the module's.
        leave = self._context.containment.guarded("operators", self._leave, always=True)
        hooks.after_forward(module, leave, prepend=True, always_call=True)

    def _lost(self, path: str, why: str) -> None:
        if why and self._sink.progress.observing:
            message = f"{UNSEEN}: {why}"
            self._sink.unobserved(message, phase="forward", path=path_in_whole(path), slot="output[0]", stage=OPERATOR)

    def is_at_work(self) -> bool:
        """True if an operator that is called now may be one to record."""
        return bool(self._calls or self._in_backward) and not self._context.containment.is_running()

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        progress = self._sink.progress
        if not progress.observing or progress.evaluating or progress.hidden:
            return
        if not self._calls:
            self._thread = threading.get_ident()
        elif self._thread != threading.get_ident():  # it runs beside the outermost call, in no certain order
            return
        stage = RECOMPUTED_OPERATOR if inside_backward() else OPERATOR
        inside = ModuleCall(path=path, stage=stage, call=progress.next_call(path, stage))
        self._calls.append((module, inside))
        self._switch()

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        if self._calls and self._calls[-1][0] is module and self._thread == threading.get_ident():
            self._calls.pop()
            if not self._calls:
                self._nodes.outside()
                self._switch()

    def _begin_forward(self) -> None:
        """Forget calls that an interrupt has ended: torch does not run their hooks."""
        if self._calls and self._thread == threading.get_ident() and not inside_backward():
            self._calls.clear()
            self._nodes.outside()
            self._switch()

    def _begin_backward(self, roots: Sequence[Tensor], *_: Any) -> None:
        if self._sink.progress.observing and self._nodes:
            for node in nodes_of(roots):
                if not node.name().startswith(_COMPUTE_OTHERWISE):
                    continue
                self._without_mode += _run_without(self._mode, node)
                if (made := self._nodes.find(node)) is not None:
                    inside = made.inside
                    path = f"{inside.path or ROOT}/{node.name()}[{inside.next_number('backward', node.name())}]"
                    self._sink.unobserved(
                        WITHOUT_MODE, phase="backward", path=path, slot="output[0]", stage=inside.stage
                    )
            self._in_backward = True
            self._switch()

    def _end_backward(self) -> None:
        self._in_backward = False
        self._unhook()
        self._switch()

    def _unhook(self) -> None:
        while self._without_mode:
            self._without_mode.pop().remove()

    def _end_step(self) -> None:
        self._calls.clear()
        self._nodes.clear()
        self._memory.clear()
        self._in_backward = False
        self._switch()
        if not self._is_written:
            self._is_written = True
            self._context.describe("operators", self._described)

    def _let_go(self) -> None:
        self._calls.clear()
        self._in_backward = False
        self._unhook()
        self._switch()

    def _switch(self) -> None:
        """Turn the mode on or off, whatever other modes are on."""
        wanted = bool(self._calls) or self._in_backward
        if wanted and not self._is_on:
            enter_mode(self._mode)
        elif not wanted:  # also where it was left already: autograd puts back what a hook in a backward pass has left
            leave_mode(self._mode)
        self._is_on = wanted

    def _begin(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Running | None:
        """Record the inputs of an operator; None if it is not one to record."""
        node: Any = None
        if self._calls:
            phase, inside, made = "forward", self._calls[-1][1], None
        else:
            node = running_node()
            made = None if node is None else self._nodes.find(node)
            if made is None:
                return None
            phase, inside = "backward", made.inside
        schema = schema_of(operator)
        given = inputs_of(schema, args, kwargs)
        if any(is_abstract(tensor) for _, tensor in given):
            return None
        path = f"{inside.path or ROOT}/{schema.name}[{inside.next_number(phase, schema.name)}]"
        source = called_from(in_backward=node is not None)
        if made is None:
            self._nodes.note(Made(inside=inside, operator=path, source=source))
        described = self._described.setdefault(phase, {})
        if path not in described and self._described_bytes <= MOST_DESCRIBED_BYTES:  # once for all calls and steps
            about: dict[str, Any] = {"settings": settings_of(schema, args, kwargs)}
            if made is not None:
                about |= {"node": node.name(), "of": made.operator}
                source = source or made.source
            described[path] = about if source is None else {**about, "source": source}
            self._described_bytes += len(str(described[path])) + len(path) + _FRAME_BYTES
            self._is_written = False
        running = _Running(schema, phase, path, inside)
        for slot, tensor in given:
            self._emit(running, slot, tensor)
        return running

    def _end(self, running: _Running, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Record the outputs of the operator."""
        schema, found = running.schema, outputs_of(running.schema, args, kwargs, output)
        if schema.undefined or schema.workspaces or self._memory:
            self._memory.note(schema, args, kwargs, output)
        for slot, tensor in found:
            self._emit(running, slot, tensor)

    def _emit(self, running: _Running, slot: str, tensor: Tensor) -> None:
        inside = running.inside
        if self._memory.is_undefined(tensor):
            self._sink.unobserved(UNDEFINED, phase=running.phase, path=running.path, slot=slot, stage=inside.stage)
            return
        self._sink.emit(
            tensor, phase=running.phase, path=running.path, slot=slot, stage=inside.stage, call=inside.call,
            scaled=False,
        )  # fmt: skip


class _Mode(TorchDispatchMode):
    """Shows each operator to the tap, before and after it has run."""

    supports_higher_order_operators = True  # such as `torch.cond`; else torch refuses to run them

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run; else torch runs the function without it, or refuses to."""
        return True

    def __init__(self, tap: _Operators) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tap = tap

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        running = self._tap.begin(func, args, kwargs) if self._tap.is_at_work() else None
        output = func(*args, **kwargs)
        if running is not None:
            self._tap.end(running, args, kwargs, output)
        return output


_COMPUTE_OTHERWISE = ("ProdBackward", "MaskedFillBackward1")
"""First parts of the names of nodes that take another formula, which rounds otherwise, while any mode is on.

These are all that were found among the operators that torch lists for its own tests (`op_db`).
"""

WITHOUT_MODE = "its backward pass computes other bits while it is looked into"


def _run_without(mode: TorchDispatchMode, node: Any) -> tuple[Any, Any]:
    """Take a mode off while a node runs; returns the handles of the hooks that do it."""
    hidden = ExitStack()

    def before(_: Any) -> None:
        hidden.callback(hide_dispatch_mode(mode))

    def after(_: Any, __: Any) -> None:
        hidden.close()

    return node.register_prehook(before), node.register_hook(after)
