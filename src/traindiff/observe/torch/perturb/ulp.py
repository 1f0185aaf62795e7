"""A replica in which every observed tensor is randomly rounded by one unit in the last place."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from traindiff.core.site import canonical_paths
from traindiff.core.torch_compat.execution import version_of
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.followed_modules import takes_hooks
from traindiff.observe.torch.hooks.inspect import alter_inspected
from traindiff.observe.torch.hooks.nested import replaced, tensors
from traindiff.observe.torch.perturb.random_rounding import is_rounded, randomly_rounded, rounding_key
from traindiff.observe.torch.perturb.replica import NAME


class UlpReplica:
    """Rounds what modules return, the gradients of it, and the gradients of parameters.

    What is observed is what came out of the rounding, and it is what the training goes on with. All of
    the model is perturbed, observed or not: what is observed depends on what is not. Random bits
    depend on seed, step, site and the tensor itself, so a forward pass that activation
    checkpointing repeats is rounded as it was the first time, and no generator is drawn from.

    A tensor is rounded where it was computed: one that a module only passes on (an input, a parameter, the
    output of a module inside) stays the very tensor that it was, and gradients meet in it as they
    did before.

    Args:
        seed: Another seed rounds in another way.
        root: The module that the training loop calls.
        names: Canonical path of every parameter of it by id.
    """

    def __init__(self, seed: int, root: nn.Module, names: Mapping[int, str]) -> None:
        self._seed = seed
        self._root = root
        self._names = names
        self._versions = WeakIdKeyDictionary()

    def attach(self, sink: Sink) -> ExitStack:
        """See `traindiff.observe.torch.perturb.replica.Replica`."""
        altering = partial(sink.altering, NAME)
        modules = dict(self._root.named_modules())
        with ExitStack() as undo:
            for name, path in canonical_paths(modules).items():
                if takes_hooks(module := modules[name]):
                    hook = altering(partial(self._outputs, sink, path))
                    undo.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            for parameter in self._root.parameters():
                if parameter.requires_grad:
                    hook = altering(partial(self._contribution, sink, self._names[id(parameter)]))
                    undo.callback(parameter.register_hook(hook).remove)
            undo.callback(register_optimizer_step_pre_hook(altering(partial(self._gradients, sink))).remove)
            undo.enter_context(alter_inspected(altering(partial(self._inspected, sink))))
            undo.callback(self._versions.clear)
            return undo.pop_all()

    def _key(self, sink: Sink, *site: str) -> int:
        return rounding_key(self._seed, sink.progress.step, *site)

    def _outputs(self, sink: Sink, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """What the module returns, rounded; None if nothing in it is."""
        found = list(tensors(output, "output"))
        held = {id(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
        given = {id(tensor) for _, tensor in (*tensors(args, ""), *tensors(kwargs, ""))}
        rounded: dict[int, Tensor] = {}
        for slot, tensor in found:
            if id(tensor) in rounded or id(tensor) in held or self._is_passed_on(tensor, given):
                continue
            if is_rounded(tensor) and not (tensor.is_leaf and tensor.requires_grad):
                rounded[id(tensor)] = self._rounded(sink, tensor, path, slot)
        return replaced(output, rounded) if rounded else None

    def _inspected(self, sink: Sink, name: str, tensor: Any) -> Tensor | None:
        if not isinstance(tensor, Tensor) or not is_rounded(tensor) or (tensor.is_leaf and tensor.requires_grad):
            return None
        return None if self._is_passed_on(tensor, set()) else self._rounded(sink, tensor, name, "inspected")

    def _is_passed_on(self, tensor: Tensor, given: set[int]) -> bool:
        """Whether there is nothing new in the tensor: it was rounded before, or given and not written to."""
        version = version_of(tensor)
        if tensor in self._versions:
            return bool(self._versions[tensor] == version)
        return id(tensor) in given and version <= 0

    def _rounded(self, sink: Sink, tensor: Tensor, path: str, slot: str) -> Tensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            rounded: Tensor = _Rounded.apply(  # type: ignore[no-untyped-call]
                tensor, self._key(sink, "forward", path, slot)
            )
            key = self._key(sink, "backward", path, slot)
            # A hook on the tensor, not a part of the function: taps' hooks come after it.
            rounded.register_hook(sink.altering(NAME, partial(_rounded_gradient, key)))
        else:
            rounded = randomly_rounded(tensor, self._key(sink, "forward", path, slot))
        self._versions[rounded] = version_of(rounded)
        return rounded

    def _contribution(self, sink: Sink, path: str, gradient: Tensor | None) -> Tensor | None:
        return _rounded_gradient(self._key(sink, "grad.micro", path), gradient)

    def _gradients(self, sink: Sink, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Round the gradients that the optimizer is about to use, in place.

        Where `step` is given a closure, that computes them: there, only contributions are rounded.
        """
        if (args[1] if len(args) > 1 else kwargs.get("closure")) is not None:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                path, gradient = self._names.get(id(parameter)), parameter.grad
                if path is not None and gradient is not None and is_rounded(gradient):
                    held = _local(gradient.detach())
                    held.copy_(randomly_rounded(held, self._key(sink, "grad", path)))


def _local(tensor: Any) -> Tensor:
    """What this rank holds of a DTensor, as a view; any other tensor itself."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


class _Rounded(torch.autograd.Function):
    """The rounded tensor; its gradient is that of the tensor."""

    @staticmethod
    def forward(tensor: Tensor, key: int) -> Tensor:
        return randomly_rounded(tensor, key)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.set_materialize_grads(False)  # where there is no gradient, none is made of zeros

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:  # noqa: ARG004
        return gradient, None


def _rounded_gradient(key: int, gradient: Tensor | None) -> Tensor | None:
    """The gradient, rounded; None if it is not, or autograd has none to hand on."""
    return randomly_rounded(gradient, key) if gradient is not None and is_rounded(gradient) else None
