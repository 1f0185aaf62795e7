"""Hooks on the step of an optimizer that run once in each step, however many classes it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.compiler import is_compiling
from torch.optim import Optimizer

from traindiff.taps._torch_compat import is_nested_step
from traindiff.taps.held_hooks import HeldHooks

StepHook = Callable[..., Any]
"""Called with the optimizer, and with positional and keyword arguments of its `step`."""


def hook_before_step(optimizer: Optimizer, hook: StepHook) -> HeldHooks:
    """Have `hook` called before each step, until the result is removed."""
    hooks = HeldHooks()
    hooks.before_step(optimizer, _once(hook))
    return hooks


def hook_after_step(optimizer: Optimizer, hook: StepHook) -> HeldHooks:
    """Have `hook` called after each step, until the result is removed."""
    hooks = HeldHooks()
    hooks.after_step(optimizer, _once(hook))
    return hooks


def _once(hook: StepHook) -> StepHook:
    def call(optimizer: Optimizer, *arguments: Any) -> None:
        if is_compiling() or not is_nested_step(optimizer):
            hook(optimizer, *arguments)

    return call
