"""Hooks on the steps of optimizers, and what can be asked of a step."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from traindiff.core.torch_compat.compiling import is_dynamo_compiling
from traindiff.core.torch_compat.training import STEP_POST_HOOKS, STEP_PRE_HOOKS, is_nested_step
from traindiff.observe.torch.hooks.followed_modules import HeldHooks
from traindiff.observe.torch.hooks.inert_on_copy import InertOnCopy, put_last

StepHook = Callable[..., Any]
"""Called with the optimizer, and with the positional and keyword arguments of its `step`."""


def hook_before_step(optimizer: Optimizer, hook: StepHook) -> HeldHooks:
    """Have `hook` called before each step, until the result is removed."""
    hooks = HeldHooks()
    hooks.before_step(optimizer, Once(hook))
    return hooks


def hook_after_step(optimizer: Optimizer, hook: StepHook) -> HeldHooks:
    """Have `hook` called after each step, before hooks that may change what the step wrote, until it is removed."""
    hooks = HeldHooks()
    hooks.after_step(optimizer, Once(hook))
    registered = getattr(optimizer, STEP_POST_HOOKS)
    for key in [*registered][:-1]:
        registered[key] = registered.pop(key)
    return hooks


def put_ours_last(optimizer: Optimizer) -> None:
    """Have our hooks called last before a step, so that they see what it reads.

    Hooks of the training may change gradients there, also those that were registered after ours.
    """
    put_last(getattr(optimizer, STEP_PRE_HOOKS), Once)


class Once(InertOnCopy):
    """A hook that is called once per step, although a subclass's `step` may call that of its base."""

    def __init__(self, hook: StepHook) -> None:
        self._hook = hook

    def __call__(self, optimizer: Optimizer, *arguments: Any) -> Any:
        """Call the hook, unless `step` was called by another `step`."""
        if is_dynamo_compiling() or not is_nested_step(optimizer):
            return self._hook(optimizer, *arguments)
        return None


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that updates this rank's parameters and keeps their state: as a rule the optimizer itself.

    `ZeroRedundancyOptimizer` steps an inner optimizer, then broadcasts the parameters that this has written. With
    `overlap_with_ddp` it has none that can be followed.
    """
    module = sys.modules.get("torch.distributed.optim")
    kind = getattr(module, "ZeroRedundancyOptimizer", None)
    if kind is None or not isinstance(optimizer, kind):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def has_closure(*call: Any) -> bool:
    """True if a hook on `step`, called with the optimizer, `args` and `kwargs`, was called for `step(closure)`."""
    if len(call) < 3:
        return False
    optimizer, args, kwargs = call  # `args` begins with the optimizer itself
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    kind: Any = type(optimizer)
    return callable(closure) and _takes_closure(kind, by_place=len(args) > 1)


def has_no_closure(*call: Any) -> bool:
    """True if such a hook was called for a step without a closure."""
    return not has_closure(*call)


@lru_cache(maxsize=256)
def _takes_closure(kind: Any, *, by_place: bool) -> bool:
    """True if the first argument of `step`, or the one that is called so, is the closure: a class may have another."""
    try:
        _, *parameters = inspect.signature(kind.step).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return True
    named = [one for one in parameters if one.name == "closure"]
    if by_place:
        first = parameters[0] if parameters else None
        return first is None or first.kind is inspect.Parameter.VAR_POSITIONAL or first in named
    return bool(named) or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def leaves_out(optimizer: Optimizer) -> bool:
    """True if a fused optimizer is about to skip its step: a loss scaler has told it of infinite gradients.

    Waits for the device.
    """
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and bool(found.item())
