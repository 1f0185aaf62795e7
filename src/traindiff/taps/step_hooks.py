"""Hooks on the step of an optimizer that run once in each step, however many classes it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.compiler import is_compiling
from torch.optim import Optimizer

from traindiff.taps._torch_compat import is_nested_step
from traindiff.taps.held_hooks import HeldHooks
from traindiff.taps.left_behind import LeftBehind

StepHook = Callable[..., Any]
"""Called with the optimizer, and with positional and keyword arguments of its `step`."""


def hook_before_step(optimizer: Optimizer, hook: StepHook) -> HeldHooks:
    """Have `hook` called before each step, until the result is removed."""
    hooks = HeldHooks()
    hooks.before_step(optimizer, _Once(hook))
    return hooks


def hook_after_step(optimizer: Optimizer, hook: StepHook) -> HeldHooks:
    """Have `hook` called after each step, until the result is removed."""
    hooks = HeldHooks()
    hooks.after_step(optimizer, _Once(hook))
    return hooks


class _Once(LeftBehind):
    def __init__(self, hook: StepHook) -> None:
        self._hook = hook

    def __call__(self, optimizer: Optimizer, *arguments: Any) -> None:
        if is_compiling() or not is_nested_step(optimizer):
            self._hook(optimizer, *arguments)
