"""The mode that shows a tap each operator that a training calls, with its place in the training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from traindiff.core.kernels.torch_arrays import is_abstract
from traindiff.core.observation import UNSEEN
from traindiff.core.site import ROOT, path_in_whole
from traindiff.core.torch_compat.autograd import inside_backward, running_node
from traindiff.core.torch_compat.modes import TorchDispatchMode, hide_dispatch_mode, num_dispatch_modes
from traindiff.observe.torch.hooks.backward_calls import nodes_of
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.followed_modules import Following, HeldHooks, takes_hooks
from traindiff.observe.torch.hooks.operator_calls import (
    GraphNodes,
    Made,
    ModuleCall,
    Schema,
    called_from,
    inputs_of,
    schema_of,
    settings_of,
)
from traindiff.observe.torch.hooks.out_of_sight import enter_mode, leave_mode

MOST_DESCRIBED_BYTES = 40_000_000
"""Size of the sources and settings of operators that are kept, as JSON: readers refuse a larger `rank.json`."""

_FRAME_BYTES = 250
"""Size of an operator in there beside its texts: keys, indentation."""


class OperatorCall(NamedTuple):
    """One operator that is about to run.

    Attributes:
        operator: The operator, which can be called.
        schema: Its properties.
        phase: `forward` or `backward`.
        path: `MODULE/OPERATOR[N]`.
        inside: The call of the module in which it runs, or whose forward pass made its node of the graph.
        about: Its description in `rank.json`; the tap may add to it until the step ends.
    """

    operator: Any
    schema: Schema
    phase: str
    path: str
    inside: ModuleCall
    about: dict[str, Any]


class OperatorTap(Protocol):
    """A tap that is shown operators."""

    name: str
    """Its name in `traindiff.core.tap_registry`, and the name of the descriptions in `rank.json`."""

    stages: tuple[str, str]
    """Stages of what it records: of operators, and of those that activation checkpointing runs a second time."""

    slot: str
    """Slot at which it says that a whole module was not seen."""

    looks_inside: bool
    """True if it is shown the operators that subclasses of tensors, and compiled code, call themselves."""

    def wants(self, schema: Schema) -> bool:
        """True if it looks at operators like this one."""

    def hidden(self, path: str, inside: ModuleCall) -> None:
        """A node of the graph is not shown: while any mode is on, it would compute other bits."""

    def begin(self, call: OperatorCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """An operator is about to run. `end` is called after it with what this returns, unless that is None."""

    def end(self, running: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """The operator has run."""

    def end_step(self) -> None:
        """The step has ended, and what is known of its memory is void."""


class ShownOperators:
    """Shows a tap the operators inside some modules, forward and backward.

    A `TorchDispatchMode` sees each operator below autograd. It is on only inside these modules, and during the
    backward pass of a step in which one of them was called. There it asks autograd for the node that runs, and the
    number of the node tells which module's forward pass made it. So nothing is hooked to the graph, and operators of a
    `torch.autograd.Function`, or of activation checkpointing, are seen like all others.

    Args:
        context: The training.
        tap: Is shown the operators.
    """

    def __init__(self, context: TapContext, tap: OperatorTap) -> None:
        self._context = context
        self._sink = context.sink
        self._tap = tap
        self._guarded: Callable[..., Any] = partial(context.sink.guarded, tap.name)
        self._mode = _Mode(self, looks_inside=tap.looks_inside)
        self._is_on = False
        self._in_backward = False
        self._calls: list[tuple[nn.Module, ModuleCall]] = []
        self._thread = 0  # the thread of the outermost of these calls
        self._without_mode: list[Any] = []  # handles of the hooks of the backward pass that is running
        self._nodes = GraphNodes()
        self._described: dict[str, dict[str, Any]] = {}
        self._described_bytes = 0
        self._is_written = True
        self.begin = context.sink.altering(tap.name, self._begin)
        self.end = context.sink.guarded(tap.name, tap.end)

    def attach(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Show the operators inside these modules, given by path."""
        guarded, events = self._guarded, self._context.events
        events.before_forward.append(guarded(self._begin_forward))
        for event in (events.after_step, events.at_end):
            event.append(guarded(self._end_step))
        events.before_backward.append(guarded(self._begin_backward))
        always = partial(self._context.containment.guarded, self._tap.name, always=True)
        events.after_backward.append(always(self._end_backward))
        undo = self._context.undo
        undo.callback(self._let_go)
        taking = []
        for path, module in modules:
            if takes_hooks(module):
                taking.append((path, module))
            else:
                self._unobserved("TorchScript takes no hooks on modules", path)
        undo.enter_context(self._context.followed.follow(taking, Following(hook=self._hook, lost=self._lost)))

    def _unobserved(self, why: str, path: str) -> None:
        self._sink.unobserved(why, phase="forward", path=path, slot=self._tap.slot, stage=self._tap.stages[0])

    def _hook(self, path: str, module: nn.Module, hooks: HeldHooks) -> None:
        hooks.before_forward(module, self._guarded(partial(self._enter, path_in_whole(path))))
        # First, so that operators of other hooks on the output are not taken for the module's.
        leave = self._context.containment.guarded(self._tap.name, self._leave, always=True)
        hooks.after_forward(module, leave, prepend=True, always_call=True)

    def _lost(self, path: str, why: str) -> None:
        if why and self._sink.progress.observing:
            self._unobserved(f"{UNSEEN}: {why}", path_in_whole(path))

    def is_at_work(self) -> bool:
        """True if an operator that is called now may be one to record."""
        return bool(self._calls or self._in_backward) and not self._context.containment.is_running()

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        progress = self._sink.progress
        if not progress.observing or progress.evaluating or progress.hidden or self._context.other_threads.is_this():
            return
        if not self._calls:
            self._thread = threading.get_ident()
        elif self._thread != threading.get_ident():  # it runs beside the outermost call, in no certain order
            return
        stage = self._tap.stages[inside_backward()]
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
                    self._tap.hidden(path, inside)
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
        self._tap.end_step()
        self._in_backward = False
        self._switch()
        if not self._is_written:
            self._is_written = True
            self._context.describe(self._tap.name, self._described)

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

    def _begin(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the tap returns for an operator that is about to run; None if it is not one to show."""
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
        if any(is_abstract(tensor) for _, tensor in inputs_of(schema, args, kwargs)):
            return None
        path = f"{inside.path or ROOT}/{schema.name}[{inside.next_number(phase, schema.name)}]"
        source = called_from(in_backward=node is not None, through_compiled=self._tap.looks_inside)
        if made is None:
            self._nodes.note(Made(inside=inside, operator=path, source=source))
        if not self._tap.wants(schema):
            return None
        described = self._described.setdefault(phase, {})
        if path not in described and self._described_bytes <= MOST_DESCRIBED_BYTES:  # once for all calls and steps
            about: dict[str, Any] = {"settings": settings_of(schema, args, kwargs)}
            if made is not None:
                about |= {"node": node.name(), "of": made.operator}
                source = source or made.source
            described[path] = about if source is None else {**about, "source": source}
            self._described_bytes += len(str(described[path])) + len(path) + _FRAME_BYTES
            self._is_written = False
        return self._tap.begin(
            OperatorCall(operator, schema, phase, path, inside, described.get(path, {})), args, kwargs
        )


class _Mode(TorchDispatchMode):
    """Shows each operator, before and after it has run."""

    supports_higher_order_operators = True  # such as `torch.cond`; else torch refuses to run them

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run; else torch runs the function without it, or refuses to."""
        return True

    def __init__(self, shown: ShownOperators, *, looks_inside: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shown = shown
        self._looks_inside = looks_inside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._looks_inside and types and any(map(_dispatches, types)) and not num_dispatch_modes():
            return NotImplemented  # the subclass computes with plain tensors, and these come here
        kwargs = kwargs or {}
        running = self._shown.begin(func, args, kwargs) if self._shown.is_at_work() else None
        output = func(*args, **kwargs)
        if running is not None:
            self._shown.end(running, args, kwargs, output)
        return output


def _dispatches(kind: type) -> bool:
    """True if tensors of this class compute by a function of their own; torch names plain tensors here, too."""
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


_COMPUTE_OTHERWISE = ("ProdBackward", "MaskedFillBackward1")
"""First parts of the names of nodes that take another formula, which rounds otherwise, while any mode is on.

These are all that were found among the operators that torch lists for its own tests (`op_db`).
"""


def _run_without(mode: TorchDispatchMode, node: Any) -> tuple[Any, Any]:
    """Take a mode off while a node runs; returns the handles of the hooks that do it."""
    hidden = ExitStack()

    def before(_: Any) -> None:
        hidden.callback(hide_dispatch_mode(mode))

    def after(_: Any, __: Any) -> None:
        hidden.close()

    return node.register_prehook(before), node.register_hook(after)
