"""Follow ranks that have run out of inputs, and wait for the others inside `torch.distributed.algorithms.join`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from traindiff.core.torch_compat.training import (
    counting_iterations,
    divides_by_active_ranks,
    join_class,
    joined_by,
    modules_in,
)
from traindiff.observe.common.listeners import Listeners
from traindiff.observe.torch.hooks.context import TapContext


def attach(context: TapContext) -> None:
    """Follow the end of each `Join`, also of `DistributedDataParallel.join()`.

    A rank whose inputs end earlier takes part in the collectives of the others until theirs end, too. It takes no
    steps meanwhile, so its steps would have other numbers than theirs from then on: they are counted as if it had
    taken them. `rank.json` says which steps these are (`joined`). There is no hook for it, so `Join.__exit__` is
    replaced while at least one tap is attached.
    """
    if join_class() is not None:
        context.undo.enter_context(_listeners.attach(_Listener(context)))


class _Listener:
    """Is told how often this rank took part in the collectives of ranks that still had inputs."""

    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._progress = context.sink.progress
        self._guarded = partial(context.sink.guarded, "uneven_inputs")
        self._ours = {id(module) for module in modules_in(context.targets.root)}
        self._passes = 0  # forward passes with gradients, of this step so far
        self._passes_before = 0  # of the step before
        self._joined: list[dict[str, Any]] = []
        self.begin = self._guarded(self._begin)
        context.events.before_forward.append(self._guarded(self._count_pass))
        context.events.after_step.append(self._guarded(self._end_step))

    def _count_pass(self) -> None:
        self._passes += torch.is_grad_enabled()

    def _end_step(self) -> None:
        self._passes, self._passes_before = 0, self._passes

    def _begin(self, join: Any, waiting: ExitStack) -> None:
        """This rank has run out of inputs, and waits for the others."""
        joined = joined_by(join)
        if any(map(self._is_ours, joined)):
            iterations = waiting.enter_context(counting_iterations(join))
            by_active = divides_by_active_ranks(joined)
            waiting.callback(self._guarded(self._end), self._progress.step, iterations, by_active=by_active)

    def _is_ours(self, joined: Any) -> bool:
        if isinstance(joined, nn.Module):
            return any(id(module) in self._ours for module in modules_in(joined))
        return any(tap.optimizer is joined for tap in self._context.optimizers.values())

    def _end(self, first: int, iterations: Sequence[None], *, by_active: bool) -> None:
        """No rank has inputs any more.

        Args:
            first: The current step when this rank ran out of them.
            iterations: One item for each forward pass of other ranks since then.
            by_active: Gradients were divided by the number of ranks that had inputs.
        """
        if not iterations:
            return
        passes = self._passes + len(iterations)
        each = self._passes_before or (passes if self._passes else 1)
        taken = self._progress.step - first  # ZeroRedundancyOptimizer steps while it waits
        if steps := taken or passes // each:
            about = {"divides_by_active": True} if by_active else {}
            self._joined.append({"first": first, "steps": steps, **about})
            self._context.describe("joined", self._joined)
        if steps and not taken:
            self._passes = 0
            self._context.events.on_joined(steps)


def _install() -> None:
    join: Any = join_class()
    original = join.__exit__

    @wraps(original)
    def leave(self: Any, *raised: Any) -> Any:
        with ExitStack() as waiting:
            for listener in _listeners:
                listener.begin(self, waiting)
            return original(self, *raised)

    _listeners.replace(join, "__exit__", leave)


_listeners: Listeners[_Listener] = Listeners(_install)
