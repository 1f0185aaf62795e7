"""Tell of the parameters that FSDP2 gathers, and puts in the places of a module's own while that computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from traindiff.core.site import canonical_path
from traindiff.core.torch_compat.training import parameters_by_name
from traindiff.observe.torch.hooks.context import TapContext


def follow_gathered(context: TapContext, tap: str, found: Callable[[str, Tensor], None]) -> None:
    """Have `found` called with the canonical path and the tensor of each gathered parameter, once.

    Args:
        context: The training.
        tap: The tap that an error disables.
        found: Called before the forward pass that uses the parameter.
    """
    gathered: dict[int, Tensor] = {}  # keeps the tensors alive, so that no other gets the id of one

    def before_forward(prefix: str, module: nn.Module, *_: Any) -> None:
        for name, parameter in parameters_by_name(module).items():
            path = context.targets.first_name(canonical_path(f"{prefix}.{name}" if prefix else name))
            if id(parameter) in gathered or not parameter.requires_grad or not context.targets.selects(path):
                continue
            gathered[id(parameter)] = parameter
            found(path, parameter)

    context.undo.callback(gathered.clear)
    for prefix, module in context.targets.gathering.items():
        hook = context.sink.guarded(tap, partial(before_forward, prefix))
        context.undo.callback(module.register_forward_pre_hook(hook).remove)  # behind the hook that gathers
