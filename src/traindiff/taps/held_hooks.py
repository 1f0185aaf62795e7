"""Hooks that can be asked whether they are still attached: a training may remove them, or put other dicts in place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

FORWARD = "_forward_hooks"
BEFORE_FORWARD = "_forward_pre_hooks"


class HeldHooks:
    """The hooks of one tap on one thing, and what else is undone with them.

    `remove` leaves none of them behind, even if the training copied the dict that torch keeps them in.
    """

    def __init__(self) -> None:
        self.undo = ExitStack()
        self._held: list[tuple[Any, str, int, Any]] = []  # owner, attribute with the hooks, key there, hook

    def before_forward(self, module: nn.Module, hook: Callable[..., Any], **options: Any) -> None:
        """Have `hook` called before each forward pass of a module; `options` are those of torch."""
        self._hold(module, BEFORE_FORWARD, module.register_forward_pre_hook(hook, **options), hook)

    def after_forward(self, module: nn.Module, hook: Callable[..., Any], **options: Any) -> None:
        """Have `hook` called after each forward pass of a module."""
        self._hold(module, FORWARD, module.register_forward_hook(hook, **options), hook)

    def before_step(self, optimizer: Optimizer, hook: Callable[..., Any]) -> None:
        """Have `hook` called before each step of an optimizer."""
        self._hold(optimizer, "_optimizer_step_pre_hooks", optimizer.register_step_pre_hook(hook), hook)

    def after_step(self, optimizer: Optimizer, hook: Callable[..., Any]) -> None:
        """Have `hook` called after each step of an optimizer."""
        self._hold(optimizer, "_optimizer_step_post_hooks", optimizer.register_step_post_hook(hook), hook)

    def before_every_step(self, hook: Callable[..., Any]) -> None:
        """Have `hook` called before each step of every optimizer."""
        handle = optimizers.register_optimizer_step_pre_hook(hook)
        self._hold(optimizers, "_global_optimizer_pre_hooks", handle, hook)

    def on_gradient(self, tensor: Tensor, hook: Callable[..., Any]) -> None:
        """Have `hook` called with each gradient of a tensor."""
        self._hold(tensor, "_backward_hooks", tensor.register_hook(hook), hook)

    def are_there(self) -> bool:
        """Whether torch still calls all of them."""
        for owner, attribute, key, hook in self._held:
            hooks = getattr(owner, attribute, None)
            if hooks is None or hooks.get(key) is not hook:
                return False
        return True

    @property
    def places(self) -> list[tuple[dict[str, Any], str, int]]:
        """Where each of them is: attributes of what has it, the one with its hooks, and its key among those."""
        return [(vars(owner), attribute, key) for owner, attribute, key, _ in self._held]

    def remove(self) -> None:
        """Remove them."""
        held, self._held = self._held, []
        with self.undo:
            for owner, attribute, key, hook in reversed(held):
                hooks = getattr(owner, attribute, None)
                if hooks is not None and hooks.get(key) is hook:
                    del hooks[key]

    def _hold(self, owner: Any, attribute: str, handle: Any, hook: Callable[..., Any]) -> None:
        self.undo.callback(handle.remove)
        self._held.append((owner, attribute, handle.id, hook))
