"""Observe what each step of an optimizer reads and writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling
from torch.optim import Adam, AdamW, Optimizer

from traindiff.core.observation import BEFORE, ITSELF, NO_GRADIENT, SKIPPED, UNSEEN
from traindiff.core.shards import Piece
from traindiff.core.torch_compat.autograd import version_of
from traindiff.core.torch_compat.cuda import is_capturing
from traindiff.core.torch_compat.training import calls_hooks
from traindiff.observe.torch.hooks.compiled import CallObserver, tap_compiled_calls
from traindiff.observe.torch.hooks.context import TapContext, emit_pieces
from traindiff.observe.torch.hooks.followed_modules import HeldHooks
from traindiff.observe.torch.hooks.held_before import HeldBefore
from traindiff.observe.torch.hooks.held_parameters import Held, HeldParameters
from traindiff.observe.torch.hooks.loss_scale import ScalerListener, tap_loss_scaler
from traindiff.observe.torch.hooks.marks import Marks
from traindiff.observe.torch.hooks.nested import as_dense, as_tensor, tensors
from traindiff.observe.torch.hooks.repeated import Repeated
from traindiff.observe.torch.hooks.step_hooks import Once, has_closure, has_no_closure, inner_optimizer, leaves_out
from traindiff.observe.torch.hooks.step_tensors import (
    Listed,
    gradients_of,
    has_numbers,
    main_gradient,
    state_and_values,
)
from traindiff.observe.torch.replay.formulas import settings_in_float32

UNSEEN_STEP = "parameters were written, but the step of the optimizer was called without the hooks of traindiff"

IMPLEMENTATION_CHOICES = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Entries of a parameter group that choose how an update is computed, not which update."""


class OptimizerTap:
    """Summarizes what one optimizer reads and writes: phases `grad`, `optimizer` and `param`, if they are observed.

    A call that a loss scaler skips because of infinite gradients is recorded as a step, with the gradients that the
    optimizer would have been given, and marked as skipped. Parameters that are not the model's are named by group and
    position.

    Args:
        optimizer: The optimizer.
        name: The name under which its steps and hyper-parameters are recorded.
        context: The training.
        on_end: Called with `name` when a step has ended.

    Attributes:
        was_held: The observed parameters that the optimizer, or the one before it, held in recorded steps.
        marks: Of the parameters as its latest step left them, if that was recorded.
        is_compiled: Whether a step of it ran in compiled code.
        has_closure: Whether its latest step was called with a closure.
        HOLDS_GROUPS: What is held is what is in the groups; taps of engines hold something else.
    """

    HOLDS_GROUPS = True

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        name: str,
        context: TapContext,
        on_end: Callable[[str], None],
    ) -> None:
        self.optimizer = optimizer
        self.name = name
        self._selects = context.targets.selects
        self._held = HeldParameters(context, name)
        self._repeated: defaultdict[str, Repeated] = defaultdict(Repeated)
        # By group and name: a setting as it was last recorded, and the numbers in it.
        self._settings: dict[tuple[int, str], tuple[Any, list[tuple[str, Tensor]]]] = {}
        self._observe = context.observe
        self._sink = context.sink
        self._on_end = on_end
        self._on_gradients = context.events.on_gradients
        self._before_update = context.events.before_update
        self._before_any_step = context.events.before_any_step
        self._unsettled = False
        self.has_closure = False
        self._counts_skipped = context.settings.counts_skipped
        self._main_first = context.settings.main_gradients
        self._left_out = False
        self._calls = 0
        self._calls_before_scaler = 0
        self._hooks = HeldHooks()
        self._of_model = context.targets.parameters
        self.was_held = HeldBefore(
            context.sink, optimizer=name, observe=context.observe, is_trained=self._is_trained
        )  # fmt: skip
        self.marks = Marks()
        self._all = context.optimizers
        self.is_compiled = False
        self._backward: tuple[Tensor, int, int] | None = None  # a parameter, its version, and the calls until then
        self._left: tuple[Tensor, int, int] | None = None  # a parameter, and the versions of it and its gradient then
        self._num_evaluations = 0  # calls of the closure in this step
        self._in_closure = False  # the closure that `step` was given is being called
        self._led_to_hooks: Any = None  # what was in the place of `step` when hooks on it were called last

    def attach(self) -> ExitStack:
        """Follow the optimizer's calls. Close the result to remove the tap."""
        guarded = partial(self._sink.guarded, "optimizer_step")
        with ExitStack() as undo:
            undo.callback(self._hooks.remove)
            self._hooks.before_step(self.optimizer, Once(guarded(self.before_step)))
            counting = self._sink.altering("optimizer_step", self._counting, quick=has_no_closure)
            self._hooks.before_step(self.optimizer, Once(counting))
            self._hooks.after_step(self.optimizer, Once(guarded(self.after_step, idle=self._is_left_out)))
            self._hooks.after_step(self.optimizer, Once(self._end_seen_step))
            compiled = CallObserver(begin=guarded(self._begin_compiled), end=guarded(self._end_compiled))
            undo.enter_context(tap_compiled_calls(self.optimizer, compiled))
            scaler = ScalerListener(before=self._before_scaler, after=partial(self._after_scaler, guarded(self._skip)))
            undo.enter_context(tap_loss_scaler(scaler))
            return undo.pop_all()

    def _is_trained(self, path: str) -> bool:
        """True if a parameter of the model requires a gradient, and has one."""
        parameter = self._of_model.get(path)
        return parameter is not None and parameter.requires_grad and parameter.grad is not None

    def is_attached(self) -> bool:
        """True if all hooks on the optimizer are there."""
        return self._hooks.are_there()

    def takes_over(self, before: OptimizerTap) -> None:
        """Note that the optimizer steps in place of another tap's, whose parameters may still be stepped elsewhere."""
        self.was_held.add(before.was_held)

    def note_backward(self) -> None:
        """Note that a backward pass has ended: the next change of a parameter is a step."""
        for _, parameter, _ in self.held():
            if (gradient := parameter.grad) is not None:
                version = version_of(parameter)
                self._backward = parameter, version, self._calls
                self._left = parameter, version, version_of(gradient)
                return

    def look_for_evaluation(self, *, closure: bool = False) -> None:
        """Begin another evaluation if parameters were written since the latest backward pass of this step.

        The next forward pass then contributes to no gradient of before: training loops that look for sharp minima move
        the parameters, and compute the gradient there. If a `closure` is about to be called, gradients that were
        cleared since tell the same.
        """
        if self._left is None or not self._sink.progress.backward_done:
            return
        parameter, version, version_of_gradient = self._left
        gradient = parameter.grad
        # What clips a gradient, or unscales it, writes to it, too.
        written = gradient is None or version_of(gradient) != version_of_gradient
        if version_of(parameter) != version or (closure and written and not (is_capturing() or has_numbers(gradient))):
            self._begin_evaluation()

    def _begin_evaluation(self) -> None:
        """Count a further evaluation of this step, and record the parameters as it finds them."""
        progress = self._sink.progress
        progress.begin_evaluation()
        self._left = None
        if self._left_out or not progress.observing or "param" not in self._observe:
            return
        with self._sink.together():
            for parameter, pieces in self.selected():
                self._emit_pieces(parameter, pieces, phase="param", slot="value", stage=BEFORE)

    def _counting(self, *call: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of `step` with a closure that counts evaluations; None for a step without a closure."""
        if has_no_closure(*call):
            return None
        _, args, kwargs = call
        if len(args) > 1:
            return (args[0], self._counted(args[1]), *args[2:]), kwargs
        return args, {**kwargs, "closure": self._counted(kwargs["closure"])}

    def _counted(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        guarded = partial(self._sink.guarded, "optimizer_step")
        begin, end = guarded(self._closure_begins), guarded(self._closure_ends)

        @wraps(closure)
        def counted(*args: Any, **kwargs: Any) -> Any:
            begin()
            self._in_closure = True
            try:
                result = closure(*args, **kwargs)
            finally:
                self._in_closure = False
            end()
            return result

        return counted

    def _closure_begins(self) -> None:
        self._num_evaluations += 1
        if self._num_evaluations > 1:
            self._begin_evaluation()
        else:
            self.look_for_evaluation(closure=True)

    def _closure_ends(self) -> None:
        if not self._left_out and self._sink.progress.observing:
            self.gradients()

    def end_unseen_step(self) -> None:
        """End a step that no hook has seen, if parameters were written since the last backward pass.

        Looks only if the hooks are gone, or if `step` may not lead to the method that calls them: parameters may be
        written in other ways, too.
        """
        if self._unsettled or self._in_closure:
            return  # compiled code has seen it, or the step that was seen goes on
        before, self._backward = self._backward, None
        if before is None or (self._leads_to_hooks() and self.is_attached()):
            return
        parameter, version, calls = before
        if calls != self._calls or version_of(parameter) == version:
            return
        if self._sink.progress.observing:
            for phase in ("grad", "optimizer", "param"):
                if phase in self._observe:
                    self._sink.unobserved(
                        f"{UNSEEN}: {UNSEEN_STEP}", phase=phase, path=ITSELF, slot=self.name, optimizer=self.name
                    )
        self._left_out = False
        self.marks.forget()
        self._sink.progress.unseen = True
        self._end_step()

    def _leads_to_hooks(self) -> bool:
        """True if `step` is the method that calls hooks, leads to it, or has called it the last time."""
        step = vars(self.optimizer).get("step")
        return step is None or step is self._led_to_hooks or calls_hooks(step, self.optimizer)

    def settle(self) -> None:
        """End a step that ran in compiled code; to be called after that code, when parameters can be read."""
        if self._unsettled:
            self._unsettled = False
            self._calls += 1
            self._sink.guarded("optimizer_step", self.after_step)()
            self._on_end(self.name)

    def counts_in_float32(self) -> bool:
        """True if it computes with the number of its steps in float32, and not in Python."""
        choices = ("capturable", "differentiable")
        groups = inner_optimizer(self.optimizer).param_groups
        return self.is_compiled or any(group.get(choice) for group in groups for choice in choices)

    def settings_in_float32(self) -> bool:
        """True if it is an Adam that computes with its settings in float32."""
        inner = inner_optimizer(self.optimizer)
        return isinstance(inner, Adam | AdamW) and any(map(settings_in_float32, inner.param_groups))

    def groups(self) -> list[list[str]]:
        """Canonical paths of the parameters in each group."""
        by_group: dict[int, list[str]] = {number: [] for number in range(len(self.optimizer.param_groups))}
        for number, _, pieces in self.held():
            by_group[number] += [piece.path for piece in pieces]
        return list(by_group.values())

    def before_step(self, *call: Any) -> None:
        """Record hyper-parameters, and gradients as the optimizer sees them.

        If `step` is given a closure, that computes the gradients, and they are recorded after each call of it.
        """
        self._num_evaluations = 0
        self.has_closure = has_closure(*call)
        self._left_out = not self._counts_skipped and leaves_out(self.optimizer)
        if self._left_out or not self._sink.progress.observing:
            self.marks.forget()
            return
        if not self.has_closure:
            self._before_any_step(self)
        self.marks.forget()
        if self.name == self._sink.progress.optimizer and not self.has_closure:
            self._before_update()
        if "optimizer" in self._observe:
            self._hyper_parameters()
        if not self.has_closure:
            self.gradients()

    def gradients(self, stage: str = "") -> None:
        """Record gradients as they are now: those that the optimizer sees, or those of a stage before."""
        if self._on_gradients and self._sink.progress.observing:
            contain = self._sink.progress.loss_scaled if stage == "reduced" else self._scales_itself
            self._on_gradients(self, [*self.selected()], contain and stage != "unscaled")
        if ("grad.stages" if stage else "grad") not in self._observe:
            return
        scaled = None if stage else self._scales_itself

        def emit() -> None:
            for parameter, pieces in self.selected():
                self._gradient(parameter, pieces, stage=stage, scaled=scaled)

        found, about = (None, None) if self._main_first else self._listed(gradients_of, stage=stage)
        with self._sink.together():
            self._sink.repeated(self._repeated[f"gradients {stage}"], found, emit, about=(scaled, about))

    def _is_left_out(self) -> bool:
        """True if nothing of a step is recorded."""
        return self._left_out or not self._sink.progress.observing

    def after_step(self, *_: Any) -> None:
        """Record state and parameters."""
        if self._is_left_out():
            return
        if self.has_closure and not self._num_evaluations:
            self.gradients()
        state, values = "optimizer" in self._observe, "param" in self._observe

        def emit() -> None:
            for parameter, pieces in self.selected():
                if state:
                    self._state(parameter, pieces)
                if values:
                    self._emit_pieces(parameter, pieces, phase="param", slot="value")

        states = inner_optimizer(self.optimizer).state
        found, about = self._listed(state_and_values, states, state=state, values=values)
        with self._sink.together():
            self._sink.repeated(self._repeated["after"], found, emit, about=about)
        if "update" in self._observe:  # after another run's values were put in, if they are
            self._mark_updated()
        held = self._held.paths if self.HOLDS_GROUPS else {one.path for _, pieces in self.selected() for one in pieces}
        self.was_held.note(held)

    def _mark_updated(self) -> None:
        updated = {id(parameter) for _, parameter, _ in self.updated()}
        for other in self._all.values():
            if other is not self:
                other.marks.release([parameter for _, parameter, _ in self.held()])
        self.marks.take_all([held for held in self.selected() if id(held[0]) in updated])

    def _end_seen_step(self, *_: Any) -> None:
        self._led_to_hooks = None if self.is_compiled else vars(self.optimizer).get("step")
        self._end_step()

    def _end_step(self) -> None:
        if is_compiling():
            return
        self._calls += 1
        self._left = None
        if self._num_evaluations > 1 and self.name != self._sink.progress.optimizer:
            self._sink.progress.begin_evaluation()  # what follows is of another optimizer, whose step goes on
        if not self._left_out:
            self._on_end(self.name)

    def _before_scaler(self, optimizer: Optimizer) -> None:
        if optimizer is self.optimizer:
            self._calls_before_scaler = self._calls

    def _after_scaler(self, skip: Callable[[], None], optimizer: Optimizer) -> None:
        if not self._counts_skipped:
            return
        if optimizer is self.optimizer and self._calls == self._calls_before_scaler and not self._unsettled:
            skip()
            self._end_step()

    def _skip(self) -> None:
        """Record a step that a loss scaler has skipped."""
        self.before_step()
        if self._sink.progress.observing and "optimizer" in self._observe:
            self._numbers(1, path=self.name, slot=SKIPPED)
        self.after_step()

    def _begin_compiled(self) -> None:
        self.settle()
        self.is_compiled = True
        self.before_step()

    def _end_compiled(self) -> None:
        self._unsettled = True

    def updated(self) -> Iterator[tuple[int, Tensor, Sequence[Piece]]]:
        """The entries of `held` that this rank updates itself."""
        inner = inner_optimizer(self.optimizer)
        here = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
        return (held for held in self.held() if id(held[1]) in here)

    def held(self) -> Iterable[Held]:
        """Each parameter with the number of its group and the pieces of the model's parameters in it."""
        return self._held.look(self.optimizer.param_groups).all

    def selected(self) -> Iterable[tuple[Tensor, Sequence[Piece]]]:
        """Each parameter, with the pieces in it that are observed; none without such pieces."""
        if self.HOLDS_GROUPS:
            return self._held.look(self.optimizer.param_groups).selected
        chosen = ((one, [piece for piece in pieces if self._selects(piece.path)]) for _, one, pieces in self.held())
        return (held for held in chosen if held[1])

    def _listed(self, listed: Callable[..., Listed], *args: Any, **how: Any) -> Listed:
        return listed(self._held.look(self.optimizer.param_groups), *args, **how) if self.HOLDS_GROUPS else (None, None)

    def _gradient(
        self, parameter: Tensor, pieces: Sequence[Piece], *, stage: str = "", scaled: bool | None = None
    ) -> None:
        gradient = self.gradient_of(parameter)
        if gradient is not None:
            self._emit_pieces(as_dense(gradient), pieces, phase="grad", slot="grad", stage=stage, scaled=scaled)
        elif parameter.requires_grad and not stage:
            reason = f"{NO_GRADIENT}: parameter.grad is None when the optimizer steps"
            for piece in pieces:
                self._sink.unobserved(reason, phase="grad", path=piece.path, slot="grad", optimizer=self.name)

    @property
    def _scales_itself(self) -> bool:
        """True if a loss scaler leaves it to the (fused) optimizer to divide by the loss scale."""
        return isinstance(getattr(self.optimizer, "grad_scale", None), Tensor)

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """The gradient that the optimizer reads, or Megatron's `main_grad`; None without one."""
        gradient = main_gradient(parameter) if self._main_first or parameter.grad is None else None
        return parameter.grad if gradient is None else gradient

    def _hyper_parameters(self) -> None:
        before, self._settings = self._settings, {}
        for number, entry in enumerate(self.optimizer.param_groups):
            for key, value in entry.items():
                if key in IMPLEMENTATION_CHOICES:
                    continue
                place = number, key
                same = place in before and before[place][0] is value and _is_fixed(value)
                self._settings[place] = before[place] if same else (value, list(_numbers_in(value, key)))
        found = [
            (f"{self.name}.groups[{number}]", slot, tensor)
            for (number, _), (_, tensors_in_it) in self._settings.items()
            for slot, tensor in tensors_in_it
        ]

        def emit() -> None:
            for path, slot, tensor in found:
                self._numbers(tensor, path=path, slot=slot)

        about = tuple((path, slot) for path, slot, _ in found)
        self._sink.repeated(self._repeated["settings"], [tensor for *_, tensor in found], emit, about=about)

    def _state(self, parameter: Tensor, pieces: Sequence[Piece]) -> None:
        for key, value in self.state_of(parameter).items():
            for piece in pieces if isinstance(value, (int, float)) else ():
                self._numbers(value, path=piece.path, slot=key)
            for slot, tensor in [(key, value)] if isinstance(value, Tensor) else tensors(value, key):
                is_number = not tensor.dim() and parameter.dim()  # e.g. a count of steps, beside a piece of one element
                if tensor.numel() == parameter.numel() and not is_number:
                    self._emit_pieces(tensor, pieces, phase="optimizer", slot=slot)
                    continue
                for piece in pieces:
                    self._sink.emit(tensor, phase="optimizer", path=piece.path, slot=slot, optimizer=self.name)

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        """The state that the optimizer keeps of a parameter; empty if it keeps none."""
        state: Mapping[str, Any] = inner_optimizer(self.optimizer).state.get(parameter, {})
        return state

    def _numbers(self, value: Any, *, path: str, slot: str) -> None:
        for where, tensor in _numbers_in(value, slot):
            self._sink.emit(tensor, phase="optimizer", path=path, slot=where, optimizer=self.name)

    def _emit_pieces(self, tensor: Tensor, pieces: Sequence[Piece], *, phase: str, slot: str, **about: Any) -> None:
        emit_pieces(self._sink, tensor, pieces, phase=phase, slot=slot, optimizer=self.name, **about)


def _numbers_in(value: Any, slot: str) -> Iterator[tuple[str, Tensor]]:
    """The numbers in a setting, by slot."""
    if isinstance(value, (Tensor, int, float)):
        yield slot, value if isinstance(value, Tensor) else as_tensor(value)
    elif isinstance(value, (tuple, list)):
        for index, one in enumerate(value):
            yield from _numbers_in(one, f"{slot}[{index}]")


def _is_fixed(value: Any) -> bool:
    """True if a setting holds the same numbers, or tensors, as long as it is the same object."""
    return isinstance(value, (Tensor, int, float)) or (isinstance(value, tuple) and all(map(_is_fixed, value)))
