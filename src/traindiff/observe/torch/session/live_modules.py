"""The modules that there are in this process: what wraps a module, and what of it a training loop calls."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from inspect import getattr_static

from torch import nn

from traindiff.core.site import WRAPPERS
from traindiff.core.torch_compat.training import live_children_of


def live_modules() -> list[nn.Module]:
    """Every module that is alive in this process, found through the garbage collector. Runs none of their code."""
    return [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]


def outermost(modules: Sequence[nn.Module], parameter_ids: Collection[int]) -> list[nn.Module]:
    """Of some modules, those that hold one of these parameters and are part of no other module.

    Wrappers are modules too, so that a model is found as the training loop calls it: under
    DistributedDataParallel, FSDP, DeepSpeed or `torch.compile`.

    Args:
        modules: All that there are.
        parameter_ids: Ids of parameters.
    """
    inside = {id(child) for module in modules for child in live_children_of(module)}
    return [
        module
        for module in modules
        if id(module) not in inside and any(id(one) in parameter_ids for one in module.parameters())
    ]


def distinct(models: Sequence[nn.Module], called: nn.Module | None = None) -> list[nn.Module]:
    """Of some models, those that hold parameters which no other holds: two may be wrapped around the same ones.

    Args:
        models: Modules that are part of no other.
        called: What is called; a model that it is part of is preferred to others with the same parameters.
    """
    preferred = sorted(models, key=lambda model: all(one is not called for one in model.modules()))
    largest_first = sorted(preferred, key=lambda model: -len(list(model.parameters())))
    held: list[set[int]] = []
    kept: set[int] = set()
    for model in largest_first:
        own = {id(one) for one in model.parameters()}
        if not any(own <= others for others in held):
            held.append(own)
            kept.add(id(model))
    return [model for model in models if id(model) in kept]


def outermost_around(module: nn.Module) -> nn.Module:
    """The module that the training loop calls for `module`: itself, or the outermost wrapper around it."""
    parameter_ids = {id(one) for one in module.parameters()}
    for one in outermost(live_modules(), parameter_ids):
        if any(inner is module for inner in one.modules()):
            return one
    return module


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers around it."""
    children = list(model.named_children())
    if len(children) != 1 or children[0][0] not in WRAPPERS:
        return model
    return unwrapped(children[0][1])


def called_of(model: nn.Module, first: nn.Module | None = None) -> list[nn.Module]:
    """What of a model a training loop may call: the model, or where it is a mere container, the parts of it.

    Args:
        model: A module that is part of no other.
        first: The module that is called first, where that is known. If it is not the model, others may be called, too.
    """
    if first is model or (first is None and has_forward(model)):
        return [model]
    found = [model, *trained_parts(model)]
    if first is not None and not any(one is first for one in found):
        found.append(first)
    return found


def trained_parts(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules inside a model that compute something, and have parameters to train."""
    for child in live_children_of(model):
        if not any(one.requires_grad for one in child.parameters()):
            continue
        if has_forward(child):
            yield child
        else:
            yield from trained_parts(child)


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called at all; lists of modules cannot."""
    return getattr_static(type(module), "forward") is not nn.Module.forward
