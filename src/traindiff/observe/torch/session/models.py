"""The models of a training: which modules its loop calls, what wraps them, and the names of their parameters."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from traindiff.core.site import WRAPPERS, canonical_paths, part_name
from traindiff.core.torch_compat.compiling import is_compiled
from traindiff.core.torch_compat.training import (
    children_of,
    live_children_of,
    modules_in,
    parameters_by_name,
    parameters_in,
)
from traindiff.errors import ConfigError, Problem, type_of
from traindiff.observe.common.user_input import examples, is_selected, near
from traindiff.observe.torch.hooks.followed_modules import has_forward
from traindiff.observe.torch.sharding.flat_parameters import FlatParameters
from traindiff.observe.torch.sharding.registry import ENGINES


def live_modules() -> list[nn.Module]:
    """Every module that is alive in this process, found through the garbage collector. Runs none of their code."""
    return [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]


def outermost(modules: Sequence[nn.Module], parameter_ids: Collection[int]) -> list[nn.Module]:
    """The modules that hold at least one of these parameters and are part of no other module.

    Wrappers are modules too, so a model is found as the training loop calls it: under DistributedDataParallel, FSDP,
    DeepSpeed or `torch.compile`.

    Args:
        modules: All modules of the process.
        parameter_ids: Ids of parameters.
    """
    inside = {id(child) for module in modules for child in live_children_of(module)}
    return [
        module
        for module in modules
        if id(module) not in inside and any(id(one) in parameter_ids for one in parameters_in(module))
    ]


def distinct(models: Sequence[nn.Module], called: nn.Module | None = None) -> list[nn.Module]:
    """The models whose parameters are not all in another one; two wrappers may hold the same model.

    Args:
        models: Modules that are part of no other.
        called: The module that is called; the model around it is preferred to others with the same parameters.
    """
    preferred = sorted(models, key=lambda model: all(one is not called for one in modules_in(model)))
    largest_first = sorted(preferred, key=lambda model: -len(list(parameters_in(model))))
    held: list[set[int]] = []
    kept: set[int] = set()
    for model in largest_first:
        own = {id(one) for one in parameters_in(model)}
        if not any(own <= others for others in held):
            held.append(own)
            kept.add(id(model))
    return [model for model in models if id(model) in kept]


def outermost_around(module: nn.Module) -> nn.Module:
    """The module that the training loop calls for `module`: itself, or the outermost wrapper around it."""
    parameter_ids = {id(one) for one in parameters_in(module)}
    for one in outermost(live_modules(), parameter_ids):
        if any(inner is module for inner in modules_in(one)):
            return one
    return module


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers around it."""
    children = [(name, child) for name, child in children_of(model).items() if child is not None]
    if not children or any(name not in WRAPPERS for name, _ in children):
        return model
    return unwrapped(children[0][1])


def called_of(model: nn.Module, first: nn.Module | None = None) -> list[nn.Module]:
    """The modules that a training loop may call: the model, or the parts of a model that is a mere container.

    Args:
        model: A module that is part of no other.
        first: The module that is called first, if that is known. If it is not the model, others may be called too.
    """
    if first is model or (first is None and has_forward(model)):
        return [model]
    found = [model, *trained_parts(model)]
    if first is not None and not any(one is first for one in found):
        found.append(first)
    return found


def trained_parts(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules inside a model that can be called and have parameters to train."""
    for child in live_children_of(model):
        if not any(one.requires_grad for one in parameters_in(child)):
            continue
        if has_forward(child):
            yield child
        else:
            yield from trained_parts(child)


_EMPTY = nn.Module()
_ScriptModule: type[nn.Module] = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]


class ModelParts(nn.Module):
    """Holds the parts of one model that the loop calls one by one. Names inside the parts do not change.

    Args:
        parts: The modules, each with the names that it has in the whole model.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(part_name(number), part)


class NamedModels(nn.Module):
    """Holds several models of one training, e.g. the generator and the discriminator of a GAN.

    Args:
        models: The models by name, which all paths in them begin with.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)


class NoModule(nn.Module):
    """Stands for the model of a training whose optimizers hold tensors of no module."""


def named_models(models: Mapping[Any, Any], problems: list[Problem], caller: str) -> NamedModels | None:
    """Several named models as one module; None if that is not possible.

    Args:
        models: As the user gave them.
        problems: Receives their problems.
        caller: The function to which the user gave them.
    """
    found = []
    for name, model in models.items():
        where = f"{caller}(model=...), {name!r}"
        if not isinstance(name, str) or not can_be_name(name):
            fix = 'Write a word without dots, and none that modules or their wrappers use themselves, e.g. "generator".'
            found.append(Problem(where=where, what="is no name for a model.", fix=fix))
        if not isinstance(model, nn.Module):
            fix = "Give the module that the training loop calls."
            found.append(Problem(where=where, what=f"is {type_of(model)}, not a torch.nn.Module.", fix=fix))
    if not models:
        fix = "Give at least one model."
        found.append(Problem(where=f"{caller}(model=...)", what="is empty: nothing would be recorded.", fix=fix))
    problems += found
    return None if found else NamedModels(models)


def can_be_name(name: str) -> bool:
    """True if a model can have this name, which begins its paths and is an attribute of the module around it."""
    return bool(name) and "." not in name and name not in WRAPPERS and not hasattr(_EMPTY, name)


def roots_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """The modules that the training calls: the model itself, or each of several parts or models."""
    return tuple(model.children()) if isinstance(model, (ModelParts, NamedModels)) else (model,)


def takes_hooks(model: nn.Module) -> bool:
    """True if the modules that the training calls accept hooks; those of torch.jit.script do not."""
    return not any(isinstance(one, _ScriptModule) for one in roots_of(model))


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameters:
    """The parameters of a model by canonical path.

    Attributes:
        tensors: The tensor that holds each parameter, a part of it, or several, by path; a tied parameter is under
            its first name.
        tied: Path of a parameter by each of its further names.
        ids: Canonical path of every tensor that is a parameter to torch, by id, with those that an engine made.
        shapes: Global shapes by path, where they differ from those of the tensors.
    """

    tensors: Mapping[str, nn.Parameter]
    tied: Mapping[str, str]
    ids: Mapping[int, str]
    shapes: Mapping[str, tuple[int, ...]]


def named_parameters(model: nn.Module, flat: FlatParameters) -> NamedParameters:
    """Look up the parameters of a model.

    Args:
        model: The module that the training loop calls.
        flat: The parameters that the engine has flattened.
    """
    found = parameters_by_name(model)
    canonical = canonical_paths(found)
    every = {path: found[name] for name, path in canonical.items()}
    first: dict[int, str] = {}
    for path, parameter in every.items():
        first.setdefault(id(parameter), path)
    tied = {path: first[id(parameter)] for path, parameter in every.items() if first[id(parameter)] != path}
    tensors = {path: parameter for path, parameter in every.items() if path not in tied}
    shapes = {
        path: shape
        for path, parameter in tensors.items()
        for engine in ENGINES
        if (shape := engine.global_shape(parameter)) is not None
    }
    for one in flat:
        first.setdefault(id(one.tensor), one.name)
        tensors.pop(canonical.get(one.name, ""), None)
        for member in one.members:
            tensors[member.path] = one.tensor if member.parameter is None else member.parameter
            tied.update((other, member.path) for other in member.others)
            shapes[member.path] = member.shape
    return NamedParameters(tensors=tensors, tied=tied, ids=first, shapes=shapes)


def zoomed_modules(patterns: Sequence[str], modules: Mapping[str, nn.Module], root: nn.Module) -> dict[str, nn.Module]:
    """The modules that the patterns match, and all modules inside these, in the order of `modules`.

    Args:
        patterns: Globs over canonical paths.
        modules: All modules of the model by canonical path.
        root: The model, wrapped or not.

    Raises:
        ConfigError: A pattern matches no module, or a matched module is compiled in part.
    """
    problems = [
        Problem(
            where=f"record(operators={pattern!r})",
            what=f"matches none of the model's {len(modules)} modules.",
            fix=f"{near([pattern], modules)}Modules are called like: {examples(modules)}",
        )
        for pattern in patterns
        if not any(is_selected([pattern], path) for path in modules)
    ]
    chosen = [path for path in modules if is_selected(patterns, path)]
    found = {path: module for path, module in modules.items() if any(_holds(outer, path) for outer in chosen)}
    compiled = (one for module in modules_in(root) if is_compiled(module) for one in modules_in(module))
    if not {id(module) for module in found.values()}.isdisjoint(map(id, compiled)):
        problems.append(
            Problem(
                where=f"record(operators={list(patterns)!r})",
                what="is in a part of the model that is compiled, and compiled code runs no operators one by one.",
                fix="Record the same training without torch.compile, or compare modules alone.",
            )
        )
    if problems:
        raise ConfigError("record(...)", problems, consequence="nothing was attached to the model")
    return found


def _holds(outer: str, path: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")
