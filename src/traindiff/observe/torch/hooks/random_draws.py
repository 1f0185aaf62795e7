"""Observe which modules draw random numbers in evaluation, although they are in evaluation mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from traindiff.core.observation import DRAWS
from traindiff.core.site import path_in_whole
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.followed_modules import Following, HeldHooks, takes_hooks
from traindiff.observe.torch.hooks.nested import as_tensor


def attach(context: TapContext) -> None:
    """Compare the state of torch's generators around each module of an evaluation, if evaluations are recorded."""
    if context.settings.evaluation:
        _RandomDraws(context).attach()


class _RandomDraws:
    """The calls of modules that are running, each with the random state that it found, and whether a part drew."""

    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._sink = context.sink
        self._running: list[tuple[nn.Module, list[Tensor], bool]] = []

    def attach(self) -> None:
        modules = [(path, one) for path, one in self._context.targets.modules.items() if takes_hooks(one)]
        how = Following(hook=self._hook, lost=lambda *_: None, grows=True)
        self._context.undo.enter_context(self._context.followed.follow(modules, how))

    def _hook(self, path: str, module: nn.Module, hooks: HeldHooks) -> None:
        guarded = partial(self._sink.guarded, "random_draws")
        hooks.before_forward(module, guarded(self._begin))
        hooks.after_forward(module, guarded(partial(self._end, path_in_whole(path))), always_call=True)

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        if self._context.other_threads.is_this():
            return
        if torch.is_grad_enabled():
            self._running.clear()  # of an evaluation that an error has ended
        elif self._sink.progress.observing:
            self._running.append((module, _states(), False))

    def _end(self, path: str, module: nn.Module, *about: Any) -> None:  # noqa: ARG002
        if (
            self._context.other_threads.is_this()
            or torch.is_grad_enabled()
            or not self._running
            or self._running[-1][0] is not module
        ):
            return
        _, before, part_drew = self._running.pop()
        after = _states()
        drew = len(after) != len(before) or not all(map(torch.equal, before, after))
        if drew and self._running:
            around, state, _ = self._running[-1]
            self._running[-1] = around, state, True
        if drew and not part_drew and not module.training:
            call = self._sink.progress.next_call(path, DRAWS)
            self._sink.emit(as_tensor(1), phase="forward", path=path, slot="drawn", stage=DRAWS, call=call)


def _states() -> list[Tensor]:
    """States of torch's global generators. Reading them draws nothing, and waits for no device."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states
