"""Observe each call of an optimizer: gradients and settings before it, state and parameters after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.optim import Optimizer

from traindiff.taps.compiled import tap_compiled_optimizer
from traindiff.taps.loss_scaler import tap_loss_scaler
from traindiff.taps.nested import tensors
from traindiff.taps.sink import Sink
from traindiff.taps.sparse_gradients import as_dense

IMPLEMENTATION_CHOICES = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Entries of a parameter group that choose how the same update is computed, not which."""


SKIPPED = "skipped"
"""Slot, at the optimizer's name, that marks a step which a loss scaler left out."""


class OptimizerTap:
    """Summarise what one optimizer reads and writes.

    A call that a loss scaler leaves out because of infinite gradients is a step like any other, with
    the gradients that it would have been given, marked as skipped.

    Args:
        optimizer: The optimizer.
        name: What its steps and hyper-parameters are filed under.
        names: Canonical paths by id of parameter; others are named by group and position.
        selects: Whether the parameter with this name is observed.
        observe: Phases to record, of `grad`, `optimizer` and `param`.
        sink: Receives the observations.
        on_end: Called with `name` when a step has ended.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        name: str,
        names: Mapping[int, str],
        selects: Callable[[str], bool],
        observe: Iterable[str],
        sink: Sink,
        on_end: Callable[[str], None],
    ) -> None:
        self.optimizer = optimizer
        self.name = name
        self._names = names
        self._selects = selects
        self._observe = frozenset(observe)
        self._sink = sink
        self._on_end = on_end
        self._unsettled = False
        self._has_closure = False
        self._calls = 0
        self._calls_before_scaler = 0

    def attach(self) -> ExitStack:
        """Follow the optimizer's calls. Close the result to remove the tap."""
        guarded = partial(self._sink.guarded, "optimizer_step")
        with ExitStack() as undo:
            undo.callback(self.optimizer.register_step_pre_hook(guarded(self.before_step)).remove)
            undo.callback(self.optimizer.register_step_post_hook(guarded(self.after_step)).remove)
            undo.callback(self.optimizer.register_step_post_hook(self._end_step).remove)
            compiled = _Compiled(guarded(self._begin_compiled), guarded(self._end_compiled))
            undo.enter_context(tap_compiled_optimizer(self.optimizer, compiled))
            skip = guarded(self._skip)
            undo.enter_context(tap_loss_scaler(before=self._before_scaler, after=partial(self._after_scaler, skip)))
            return undo.pop_all()

    def settle(self) -> None:
        """End a step that ran in compiled code, once what it wrote can be read: after that code."""
        if self._unsettled:
            self._unsettled = False
            self._sink.guarded("optimizer_step", self.after_step)()
            self._on_end(self.name)

    def groups(self) -> list[list[str]]:
        """Canonical paths of the parameters in each group."""
        return [
            [self._name_of(parameter, group, position) for position, parameter in enumerate(entry["params"])]
            for group, entry in enumerate(self.optimizer.param_groups)
        ]

    def before_step(self, *call: Any) -> None:
        """Record hyper-parameters, and gradients as the optimizer sees them.

        Where `step` is given a closure, that computes them: they are recorded after the step.
        """
        self._has_closure = has_closure(*call)
        if not self._sink.progress.observing:
            return
        if "optimizer" in self._observe:
            self._hyper_parameters()
        if not self._has_closure:
            with self._sink.together():
                self._gradients()

    def after_step(self, *_: Any) -> None:
        """Record state and parameters."""
        if not self._sink.progress.observing:
            return
        with self._sink.together():
            if self._has_closure:
                self._gradients()
            for path, parameter in self._parameters():
                if "optimizer" in self._observe:
                    self._state(path, self.optimizer.state.get(parameter, {}))
                if "param" in self._observe:
                    self._emit(parameter, phase="param", path=path, slot="value")

    def _end_step(self, *_: Any) -> None:
        if not is_compiling():
            self._calls += 1
            self._on_end(self.name)

    def _before_scaler(self, optimizer: Optimizer) -> None:
        if optimizer is self.optimizer:
            self._calls_before_scaler = self._calls

    def _after_scaler(self, skip: Callable[[], None], optimizer: Optimizer) -> None:
        if optimizer is self.optimizer and self._calls == self._calls_before_scaler and not self._unsettled:
            skip()
            self._end_step()

    def _skip(self) -> None:
        """Record a step that a loss scaler has left out."""
        self.before_step()
        if self._sink.progress.observing and "optimizer" in self._observe:
            self._numbers(1, path=self.name, slot=SKIPPED)
        self.after_step()

    def _begin_compiled(self) -> None:
        self.settle()
        self.before_step()

    def _end_compiled(self) -> None:
        self._unsettled = True

    def _parameters(self) -> Iterable[tuple[str, Tensor]]:
        for names, entry in zip(self.groups(), self.optimizer.param_groups, strict=True):
            for path, parameter in zip(names, entry["params"], strict=True):
                if self._selects(path):
                    yield path, parameter

    def _name_of(self, parameter: Tensor, group: int, position: int) -> str:
        return self._names.get(id(parameter)) or f"{self.name}.groups[{group}].params[{position}]"

    def _gradients(self) -> None:
        if "grad" in self._observe:
            for path, parameter in self._parameters():
                self._gradient(path, parameter)

    def _gradient(self, path: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._emit(as_dense(parameter.grad), phase="grad", path=path, slot="grad")
        elif parameter.requires_grad:
            reason = "no gradient: parameter.grad is None when the optimizer steps"
            self._sink.unobserved(reason, phase="grad", path=path, slot="grad", optimizer=self.name)

    def _hyper_parameters(self) -> None:
        for number, entry in enumerate(self.optimizer.param_groups):
            for key, value in entry.items():
                if key not in IMPLEMENTATION_CHOICES:
                    self._numbers(value, path=f"{self.name}.groups[{number}]", slot=key)

    def _state(self, path: str, state: Mapping[str, Any]) -> None:
        for key, value in state.items():
            if isinstance(value, Tensor):
                self._emit(value, phase="optimizer", path=path, slot=key)
            elif isinstance(value, (int, float)):
                self._numbers(value, path=path, slot=key)
            else:
                for slot, tensor in tensors(value, key):
                    self._emit(tensor, phase="optimizer", path=path, slot=slot)

    def _numbers(self, value: Any, *, path: str, slot: str) -> None:
        if isinstance(value, Tensor):
            self._emit(value, phase="optimizer", path=path, slot=slot)
        elif isinstance(value, (int, float)):
            number = torch.tensor(float(value), dtype=torch.float64, device="cpu")
            self._emit(number, phase="optimizer", path=path, slot=slot)
        elif isinstance(value, (tuple, list)):
            for index, one in enumerate(value):
                self._numbers(one, path=path, slot=f"{slot}[{index}]")

    def _emit(self, tensor: Tensor, *, phase: str, path: str, slot: str, stage: str = "") -> None:
        self._sink.emit(tensor, phase=phase, path=path, slot=slot, stage=stage, optimizer=self.name)


def has_closure(*call: Any) -> bool:
    """Whether a hook on `step`, called with the optimizer, `args` and `kwargs`, was called for `step(closure)`."""
    if not call:
        return False
    _, args, kwargs = call  # `args` begins with the optimizer itself
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


class _Compiled:
    """Observes the optimizer's steps in compiled code."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self.begin = begin
        self.end = end
