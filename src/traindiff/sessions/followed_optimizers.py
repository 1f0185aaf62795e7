"""The optimizers that a session follows.

No entry of the tap registry attaches them: there are as many as the training has, some appear only when they first
step, and an engine's optimizer is followed by a tap of the engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.optim import Optimizer

from traindiff.engines.deepspeed_optimizer import EngineOptimizer
from traindiff.engines.deepspeed_step import EngineOptimizerTap
from traindiff.sessions.targets import Targets
from traindiff.shards import Piece
from traindiff.taps.context import TapContext
from traindiff.taps.inner_optimizer import inner_optimizer
from traindiff.taps.optimizer_discovery import tap_optimizer_discovery
from traindiff.taps.optimizer_replay import OptimizerReplayTap
from traindiff.taps.optimizer_step import OptimizerTap
from traindiff.taps.out_of_sight import out_of_sight


class FollowedOptimizers:
    """Follows the optimizers that were given, or where none was, those that are found.

    An optimizer that is found, and was made after another had stepped that holds some of the same parameters, takes
    its place: a training that goes on with a new optimizer counts its steps on, under one name. What it replaces is
    let go of.

    Args:
        context: The training, as taps see it.
        targets: What is observed.
        taps: Filled with the tap of each optimizer that is followed, by its name.
        on_step: Called with an optimizer's name when a step of it has ended and was observed.
        on_discovery: Called when an optimizer was found.

    Attributes:
        taps: The tap of each optimizer that is followed, by its name.
    """

    def __init__(
        self,
        context: TapContext,
        targets: Targets,
        taps: dict[str, OptimizerTap],
        *,
        on_step: Callable[[str], None],
        on_discovery: Callable[[], None],
    ) -> None:
        self._context = context
        self._targets = targets
        self.taps = taps
        self._on_step = on_step
        self._on_discovery = on_discovery
        self._following: dict[str, ExitStack] = {}
        self._known: WeakSet[Optimizer] = WeakSet()
        self._names: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        self._made_before: WeakSet[Optimizer] | None = None

    def attach(self) -> ExitStack:
        """Follow them. Close the result to end that."""
        with ExitStack() as undo:
            undo.callback(self._follow_no_more)
            for name, optimizer in self._targets.optimizers.items():
                self._following[name] = self._follow(name, optimizer)
            given = [one for one in self._targets.optimizers.values() if isinstance(one, Optimizer)]
            self._known.update([*given, *map(inner_optimizer, given)])
            self._made_before = WeakSet(given) if given else None
            if not self._targets.optimizers:
                found = self._context.sink.guarded("optimizer_discovery", self._discover)
                undo.enter_context(tap_optimizer_discovery(self._context.names, found, known=self._known))
            return undo.pop_all()

    def follow(self, optimizer: Optimizer) -> None:
        """Follow one that is about to step, and was made after all those that were given, if it is of this training."""
        if optimizer in self._known:
            return
        self._known.update((optimizer, inner_optimizer(optimizer)))
        if not _held_by(optimizer).isdisjoint(self._context.names):
            self._context.sink.guarded("optimizer_discovery", self._discover)(optimizer)

    def settle(self) -> None:
        """End the steps of optimizers that ran in compiled code, which has returned by now."""
        for tap in self.taps.values():
            tap.settle()

    def describe(self) -> list[dict[str, Any]]:
        """Names, types and groups of parameters, for `rank.json`."""
        return [
            {"name": name, "type": type(tap.optimizer).__qualname__, "groups": tap.groups()}
            for name, tap in self.taps.items()
        ]

    def _follow(self, name: str, optimizer: Optimizer | EngineOptimizer) -> ExitStack:
        context = self._context
        replayed = "replay" in context.observe
        if isinstance(optimizer, EngineOptimizer):
            engine_tap = EngineOptimizerTap(optimizer, name=name, context=context, on_end=self._end_step)
            self.taps[name] = engine_tap
            attach = engine_tap.attach
            for one in engine_tap.replays() if replayed else ():
                attach = partial(one.attach, around=attach)
            return attach()
        tap = OptimizerTap(optimizer, name=name, context=context, on_end=self._end_step)
        self.taps[name] = tap
        if not replayed:
            return tap.attach()
        replay = OptimizerReplayTap(
            inner_optimizer(optimizer), name=name, held=partial(self._updated, tap), selects=context.selects,
            sink=context.sink,
        )  # fmt: skip
        return replay.attach(around=tap.attach)

    def _updated(self, tap: OptimizerTap) -> Iterator[tuple[int, Tensor, Sequence[Piece]]]:
        for number, parameter, pieces in tap.updated():
            yield number, parameter, self._targets.layout.ranges_of(parameter, pieces)

    def _discover(self, optimizer: Optimizer) -> None:
        if self._made_before is None:
            self._made_before = _live_optimizers()
        name = self._names.get(optimizer) or self._replaced_by(optimizer)
        if name is None:
            name = f"optimizer[{len(self.taps)}]" if self.taps else "optimizer"
        else:
            self._known.discard(self.taps[name].optimizer)  # if it steps again, it is found again
            self._following.pop(name).close()
        self._names[optimizer] = name
        self._following[name] = self._follow(name, optimizer)
        self._on_discovery()

    def _replaced_by(self, optimizer: Optimizer) -> str | None:
        """Name of the optimizer whose place one takes that is found now; None if it takes none's."""
        if self._made_before is None or optimizer in self._made_before:
            return None
        held = _held_by(optimizer)
        return next((name for name, tap in self.taps.items() if not held.isdisjoint(_held_by(tap.optimizer))), None)

    def _follow_no_more(self) -> None:
        with ExitStack() as undo:
            for following in self._following.values():
                undo.enter_context(following)
            self._following.clear()

    def _end_step(self, name: str) -> None:
        with out_of_sight():
            if name == self._context.sink.progress.optimizer:
                for after_step in self._context.moments.after_step:
                    after_step()
            self._on_step(name)


def _live_optimizers() -> WeakSet[Optimizer]:
    return WeakSet(one for one in gc.get_objects() if issubclass(type(one), Optimizer))


def _held_by(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
