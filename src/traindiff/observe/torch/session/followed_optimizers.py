"""The optimizers that a session follows.

They are not in the tap registry: their number depends on the training, some are found only when they first step, and
an engine's optimizer has a tap of the engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from traindiff.core.shards import Piece
from traindiff.core.torch_compat.training import is_nested_step, is_stepping
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.followed_modules import HeldHooks
from traindiff.observe.torch.hooks.loss_scale import ScalerListener, tap_loss_scaler
from traindiff.observe.torch.hooks.main_gradients import CopiesTap
from traindiff.observe.torch.hooks.optimizer_replay import OptimizerReplayTap
from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap
from traindiff.observe.torch.hooks.out_of_sight import out_of_sight
from traindiff.observe.torch.hooks.step_hooks import has_closure, inner_optimizer, put_ours_last
from traindiff.observe.torch.hooks.step_tensors import main_gradient
from traindiff.observe.torch.replay.formulas import steps_by_itself
from traindiff.observe.torch.session.models import live_modules, outermost
from traindiff.observe.torch.sharding.deepspeed_optimizer import EngineOptimizer
from traindiff.observe.torch.sharding.deepspeed_step import EngineOptimizerTap


class FollowedOptimizers:
    """Follows the given optimizers, or without any, those that are found.

    An optimizer created later for the same parameters replaces the earlier one, and step numbering continues under
    the same name. Among given optimizers it replaces one that has not stepped since the last backward pass.

    Args:
        context: The training, as taps see it.
        on_step: Called with an optimizer's name when an observed step of it has ended.
        on_discovery: Called when an optimizer was found.
        before_step: Called before each step of a followed optimizer.

    Attributes:
        taps: The tap of each followed optimizer, by its name.
    """

    def __init__(
        self,
        context: TapContext,
        *,
        on_step: Callable[[str], None],
        on_discovery: Callable[[], None],
        before_step: Callable[[], None],
    ) -> None:
        self._context = context
        self._targets = context.targets
        self.taps = context.optimizers
        self._on_step = on_step
        self._on_discovery = on_discovery
        self._before_step = before_step
        self._hooks = HeldHooks()
        self._num_backward = 0
        self._paths: dict[str, set[str]] = {}  # by name: the model's parameters in its optimizers
        self._stepped_after: dict[str, int] = {}  # by name: number of backward passes at the latest step
        self._following: dict[str, ExitStack] = {}
        self._replays: dict[str, list[OptimizerReplayTap]] = {}
        self._known: WeakSet[Optimizer] = WeakSet()
        self._names: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        self._elsewhere: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._made_before: WeakSet[Optimizer] | None = None
        self._beside: WeakSet[Optimizer] = WeakSet()  # those that were there when the first one was followed

    def attach(self) -> None:
        """Follow the optimizers."""
        undo, events, guarded = self._context.undo, self._context.events, self._context.sink.guarded
        undo.callback(self._follow_no_more)
        self._listen()
        for name, optimizer in self._targets.optimizers.items():
            self._following[name] = self._follow(name, optimizer)
        events.after_backward.append(guarded("optimizer_step", self._after_backward))
        for event in (events.before_forward, events.at_backward):
            event.insert(0, guarded("optimizer_step", self.look))
        events.before_forward.append(guarded("optimizer_step", self._look_for_evaluation))
        events.after_step.append(guarded("optimizer_step", self.look))
        given = [one for one in self._targets.optimizers.values() if isinstance(one, Optimizer)]
        self._known.update([*given, *map(inner_optimizer, given)])
        if given:
            self._made_before, self._beside = WeakSet(given), _live_optimizers()
        if not self._targets.optimizers:
            undo.enter_context(tap_loss_scaler(ScalerListener(before=self.follow)))  # it may skip the very first step
            events.on_clipping.append(guarded("optimizer_discovery", self._follow_holder))
            undo.callback(register_optimizer_step_pre_hook(self.follow).remove)

    def follow(self, optimizer: Optimizer, *call: Any) -> None:
        """Follow an optimizer that is about to step, unless it is known or not of this training.

        Hooks that are added to it now run in this very step.
        """
        if optimizer in self._known:
            return
        is_of_model = self._holds_some(optimizer) or (not self.taps and self._is_of_copies())
        if not (is_of_model or self.taps):
            return  # it may train something beside the model; then it is followed once the model's is
        self._known.update((optimizer, inner_optimizer(optimizer)))
        if is_of_model or self._is_of_no_module(optimizer):
            self._context.sink.guarded("optimizer_discovery", self._discover)(optimizer, *call)

    def _follow_holder(self, clipped: Sequence[Tensor]) -> None:
        """Follow the optimizer whose gradients are clipped before its first step, if only one can be meant.

        Otherwise the gradients before the clipping would be unknown in that step.
        """
        ids = {id(one) for one in clipped} & self._targets.names.keys()
        if not ids or any(not ids.isdisjoint(_held_by(tap.optimizer)) for tap in self.taps.values()):
            return
        holders = [one for one in _live_optimizers() if not ids.isdisjoint(_held_by(one))]
        inner = {id(inner_optimizer(one)) for one in holders if inner_optimizer(one) is not one}
        outermost = [one for one in holders if id(one) not in inner]
        if len(found := [one for one in outermost if not _is_around(one, outermost)]) == 1:
            self.follow(found[0])

    def _holds_some(self, optimizer: Optimizer) -> bool:
        """True if the optimizer holds parameters of the model."""
        return not _held_by(optimizer).isdisjoint(self._targets.names)

    def _is_of_no_module(self, optimizer: Optimizer) -> bool:
        """True if the optimizer trains tensors of no module beside the model, e.g. a temperature.

        Optimizers that are made while the training runs look for something else, e.g. for the worst input.
        """
        if self._context.settings.main_gradients:  # then those of the model may hold copies
            return False
        return optimizer in self._beside and not outermost(live_modules(), _held_by(optimizer))

    def _is_of_copies(self) -> bool:
        """True if an optimizer that holds no parameters of the model may hold copies of them; see `CopiesTap`."""
        parameters = self._targets.parameters.values()
        return self._context.settings.main_gradients and any(main_gradient(one) is not None for one in parameters)

    def look(self) -> None:
        """End steps that no hook has seen, and attach missing hooks again."""
        self.end_unseen_steps()
        if not self._hooks.are_there():
            self._hooks.remove()
            self._listen()
        for name, tap in [*self.taps.items()]:
            if not tap.is_attached():
                self._attach_again(name)

    def _look_for_evaluation(self) -> None:
        """Begin another evaluation of the step if the training has moved the parameters since the backward pass.

        If another optimizer has stepped since, the loop is past the evaluations: something moved them between steps.
        """
        progress = self._context.sink.progress
        if not progress.backward_done:
            return
        tap = self.taps.get(progress.optimizer)
        others = (number for name, number in self._stepped_after.items() if name != progress.optimizer)
        if self._num_backward in others:
            return
        # An engine may exchange parameters for its own at any time.
        exchanges = self._targets.layout.flat or self._targets.gathering or isinstance(tap, EngineOptimizerTap)
        if tap is not None and progress.chunk is None and torch.is_grad_enabled() and not exchanges:
            tap.look_for_evaluation()

    def end_unseen_steps(self) -> None:
        """End steps that no hook has seen, if there were any."""
        for tap in [*self.taps.values()]:
            tap.end_unseen_step()

    def _listen(self) -> None:
        self._hooks.before_every_step(self._context.sink.guarded("optimizer_step", self._stepping))

    def _stepping(self, optimizer: Optimizer, *call: Any) -> None:
        """Any optimizer is about to step. Hooks that are added to it now are still called for this step."""
        if is_nested_step(optimizer):
            return
        for name, tap in self.taps.items():
            if tap.optimizer is optimizer:
                self._before_step()
                if not tap.is_attached():
                    self._attach_again(name)
                put_ours_last(optimizer)
                return
        if self._targets.optimizers and optimizer not in self._known and self._steps_in_place(optimizer, *call):
            self._known.update((optimizer, inner_optimizer(optimizer)))
            self._discover(optimizer)
        elif self._is_like_one_that_is_followed(optimizer):
            self._elsewhere[optimizer] = self._elsewhere.get(optimizer, 0) + 1

    def _is_like_one_that_is_followed(self, optimizer: Optimizer) -> bool:
        """True if the optimizer holds nothing of the model, but parameters of the shapes that one for it holds."""
        if self._holds_some(optimizer):
            return False
        shapes = _shapes_of(optimizer)
        return any(_shapes_of(tap.optimizer) == shapes for tap in self.taps.values())

    def goes_on_elsewhere(self) -> str:
        """A message about the optimizer that steps since the followed ones do not; empty if there is none."""
        for optimizer, steps in self._elsewhere.items():
            latest = max(self._context.sink.progress.steps.values(), default=0) - 1
            return (
                f"the optimizers that are followed have not stepped since step {latest}. Another one, "
                f"{type(optimizer).__name__}, has stepped {steps} time{'s' if steps > 1 else ''} since. Its parameters "
                "have the same shapes, and are none of the recorded model's. If the training goes on with a copy of "
                "the model, record that one"
            )
        return ""

    def _steps_in_place(self, optimizer: Optimizer, *call: Any) -> bool:
        """True if the optimizer steps in place of a given one, and not beside it, around it or inside it."""
        self._before_step()  # it may hold parameters that have replaced others
        held = self._paths_of(optimizer)
        for name, tap in self.taps.items():
            if isinstance(tap, EngineOptimizerTap) or held.isdisjoint(self._paths.get(name, ())):
                continue
            if any(one is tap.optimizer for one in vars(optimizer).values()) or is_stepping(tap.optimizer):
                self._known.add(optimizer)
                return False
            return self._is_due(name) or has_closure(optimizer, *call)
        return False

    def _is_due(self, name: str) -> bool:
        """True if a backward pass has ended since the latest step under this name, or none was ever seen."""
        return self._stepped_after.get(name) != self._num_backward or not self._num_backward

    def _attach_again(self, name: str) -> None:
        before = self.taps[name]
        self._following.pop(name).close()
        self._following[name] = self._follow(name, before.optimizer)
        self.taps[name].takes_over(before)

    def _after_backward(self) -> None:
        self._num_backward += 1
        for tap in self.taps.values():
            tap.note_backward()

    def settle(self) -> None:
        """End the steps that optimizers made in compiled code, which has returned by now."""
        for name, tap in self.taps.items():
            for replay in self._replays[name]:
                replay.settle()
            tap.settle()

    def describe(self) -> list[dict[str, Any]]:
        """Names, types, groups of parameters, and what the optimizers compute in float32, for `rank.json`."""
        return [
            {
                "name": name,
                "type": type(tap.optimizer).__qualname__,
                "groups": tap.groups(),
                **({"counts_in_float32": True} if tap.counts_in_float32() else {}),
                **({"settings_in_float32": True} if tap.settings_in_float32() else {}),
                **({"own_step": True} if steps_by_itself(type(tap.optimizer)) else {}),
            }
            for name, tap in self.taps.items()
        ]

    def _follow(self, name: str, optimizer: Optimizer | EngineOptimizer) -> ExitStack:
        context = self._context
        if isinstance(optimizer, EngineOptimizer):
            engine_tap = EngineOptimizerTap(optimizer, name=name, context=context, on_end=self._end_step)
            self.taps[name], replays = engine_tap, engine_tap.replays()
        else:
            kind = CopiesTap if self._is_of_copies() and not self._holds_some(optimizer) else OptimizerTap
            tap = kind(optimizer, name=name, context=context, on_end=self._end_step)
            tap.held()  # those of no module get names
            self._paths.setdefault(name, set()).update(self._paths_of(optimizer))
            replay = OptimizerReplayTap(
                inner_optimizer(optimizer), name=name, held=partial(self._updated, tap),
                selects=context.targets.selects, sink=context.sink,
            )  # fmt: skip
            self.taps[name], replays = tap, [replay]
        attach = self.taps[name].attach
        self._replays[name] = replays if "replay" in context.observe else []
        for one in self._replays[name]:
            attach = partial(one.attach, around=attach)
        return attach()

    def _updated(self, tap: OptimizerTap) -> Iterator[tuple[int, Tensor, Sequence[Piece]]]:
        for number, parameter, pieces in tap.updated():
            yield number, parameter, self._targets.layout.ranges_of(parameter, pieces)

    def _discover(self, optimizer: Optimizer, *call: Any) -> None:
        if self._made_before is None:
            self._made_before = self._beside = _live_optimizers()
        name = self._names.get(optimizer) or self._replaced_by(optimizer)
        of_copies = next((name for name, tap in self.taps.items() if isinstance(tap, CopiesTap)), None)
        if of_copies is not None:  # this one holds the model's parameters, so the other was of something else
            name = of_copies
        elif name in self.taps and not (self._is_due(name) or has_closure(optimizer, *call)):
            return  # it steps beside the optimizer with this name, which continues
        if name is None:
            name = f"optimizer[{len(self.taps)}]" if self.taps else "optimizer"
        else:
            self._known.discard(self.taps[name].optimizer)  # if it steps again, it is found again
            self._following.pop(name).close()
        before = self.taps.get(name)
        self._names[optimizer] = name
        self._following[name] = self._follow(name, optimizer)
        if before is not None:
            self.taps[name].takes_over(before)
        self._on_discovery()

    def _replaced_by(self, optimizer: Optimizer) -> str | None:
        """Name of the optimizer that a newly found one replaces; None if it replaces none."""
        if self._made_before is None or optimizer in self._made_before:
            return None
        held = self._paths_of(optimizer)
        return next((name for name in self.taps if not held.isdisjoint(self._paths.get(name, ()))), None)

    def _paths_of(self, optimizer: Optimizer) -> set[str]:
        """Paths of the model's parameters that an optimizer holds."""
        return {path for key in _held_by(optimizer) if (path := self._targets.names.get(key)) is not None}

    def _follow_no_more(self) -> None:
        with ExitStack() as undo:
            undo.callback(self._hooks.remove)
            for following in self._following.values():
                undo.enter_context(following)
            self._following.clear()

    def _end_step(self, name: str) -> None:
        self._stepped_after[name] = self._num_backward
        if self._elsewhere:
            self._elsewhere.clear()
        self._context.containment.together(self._tell_of_end, name)

    def _tell_of_end(self, name: str) -> None:
        with out_of_sight():
            if name == self._context.sink.progress.optimizer:
                self._context.events.after_step()
            self._on_step(name)
            self._context.events.after_call(name)


def _live_optimizers() -> WeakSet[Optimizer]:
    return WeakSet(one for one in gc.get_objects() if issubclass(type(one), Optimizer))


def _is_around(optimizer: Optimizer, others: Sequence[Optimizer]) -> bool:
    """True for an optimizer that only calls another one, as Accelerate's does: hooks run at the other one's step."""
    held = {id(one) for one in vars(optimizer).values()}
    return any(id(other) in held for other in others if other is not optimizer)


def _held_by(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _shapes_of(optimizer: Optimizer) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]]
