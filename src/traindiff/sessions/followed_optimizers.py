"""The optimizers that a session follows.

No entry of the tap registry attaches them: there are as many as the training has, some appear only when they first
step, and an engine's optimizer is followed by a tap of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

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


class FollowedOptimizers:
    """Follows the optimizers that were given, or where none was, those that are found.

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
        self._discovered = ExitStack()

    def attach(self) -> ExitStack:
        """Follow them. Close the result to end that."""
        with ExitStack() as undo:
            for name, optimizer in self._targets.optimizers.items():
                undo.enter_context(self._follow(name, optimizer))
            if not self._targets.optimizers:
                undo.enter_context(self._discovered)
                found = self._context.sink.guarded("optimizer_discovery", self._discover)
                undo.enter_context(tap_optimizer_discovery(self._context.names, found))
            return undo.pop_all()

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
        name = f"optimizer[{len(self.taps)}]" if self.taps else "optimizer"
        self._discovered.enter_context(self._follow(name, optimizer))
        self._on_discovery()

    def _end_step(self, name: str) -> None:
        if name == self._context.sink.progress.optimizer:
            for after_step in self._context.moments.after_step:
                after_step()
        self._on_step(name)
