"""What of a model is observed, under which canonical names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.core._torch_compat import is_fully_sharded
from traindiff.core.kernels.torch_arrays import shape_of
from traindiff.core.shards import DeclaredShard, Piece
from traindiff.core.site import ROOT, canonical_path, canonical_paths, matches, path_in_whole
from traindiff.errors import ConfigError, Problem, TraindiffWarning, level_of_caller, type_of
from traindiff.observe.common.containers import is_of
from traindiff.observe.common.user_input import warn_of_other_models
from traindiff.observe.torch.hooks.model_state import present_buffers
from traindiff.observe.torch.session.live_modules import trained_parts, unwrapped
from traindiff.observe.torch.session.model_names import (
    Parts,
    Together,
    named_parameters,
    roots_of,
    together,
    unprepared,
    zoomed_modules,
)
from traindiff.observe.torch.sharding.deepspeed_optimizer import EngineOptimizer, is_engine_optimizer
from traindiff.observe.torch.sharding.layout import Layout, find_layout, regions_of_parameters
from traindiff.observe.torch.sharding.registry import ENGINES

Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None
"""One optimizer, several, several by name, or None to find them when they first step."""

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
"""One model, several parts of one, or several models by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The modules, parameters, buffers and optimizers that a session observes.

    Attributes:
        select: Globs over canonical paths: what is observed.
        root: The module that the training loop calls, or that holds those which it calls.
        roots: What it calls: the root, or some of what that holds.
        modules: Selected modules by canonical path.
        parameters: What holds the selected parameters, by canonical path, tied ones under their first name,
            whichever of their names was selected.
        shapes: Global shapes of parameters by path, where they are not those of what holds them.
        buffers: What `root.get_buffer` calls the selected buffers, by canonical path.
        names: Canonical path of every parameter of the model, selected or not, and of what the engine has put in
            their place, by id.
        paths: Canonical paths of all parameters of the model, selected or not.
        layout: How the engine lays tensors out over ranks.
        tied: Canonical path of a parameter by each of its further names.
        optimizers: Tracked optimizers by name, the one that counts steps first.
        zoomed: Modules whose operators are recorded, by canonical path.
    """

    select: Sequence[str]
    root: nn.Module
    roots: Sequence[nn.Module]
    modules: Mapping[str, nn.Module]
    parameters: Mapping[str, nn.Parameter]
    shapes: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, str]
    names: Mapping[int, str]
    paths: frozenset[str]
    layout: Layout
    tied: Mapping[str, str]
    optimizers: Mapping[str, Optimizer | EngineOptimizer]
    zoomed: Mapping[str, nn.Module]

    @property
    def root_paths(self) -> dict[int, str]:
        """Canonical path of each of the roots, by id; parts of one model have the path of that."""
        if isinstance(self.root, Parts):
            return {id(root): "" for root in self.roots}
        paths = {id(module): canonical_path(name) for name, module in self.root.named_modules()}
        return {id(root): paths.get(id(root), "") for root in self.roots}

    @property
    def parts(self) -> dict[str, nn.Module]:
        """What the training loop may call in place of the model: its outermost parts that are trained, by path."""
        if len(self.roots) > 1:
            return {}  # what it calls is known
        parts = {id(one) for one in trained_parts(unwrapped(self.root))}
        modules = self.root.named_modules()
        return {canonical_path(name): module for name, module in modules if id(module) in parts}

    @property
    def primary(self) -> str:
        """Name of the optimizer that counts the steps of forward and backward passes."""
        return next(iter(self.optimizers), "optimizer")

    def selects(self, path: str) -> bool:
        """Whether the parameter with this path is observed; an optimizer may hold more than the model has."""
        if path in self.paths:
            return path in self.parameters
        return any(matches(glob, path) for glob in self.select)

    def pieces_of(self, parameter: Tensor, size: int | None = None) -> tuple[Piece, ...] | None:
        """What a tensor that an optimizer or autograd takes for a parameter holds of the model's; None if nothing.

        It may be none of its elements just now, or on this rank: then that is an empty tuple.

        Args:
            parameter: The tensor.
            size: Elements of its gradient, where that is asked for.
        """
        if (pieces := self.layout.pieces_of(parameter, size)) is not None:
            return pieces
        path = self.names.get(id(parameter))
        return None if path is None else (Piece(path=path),)

    @property
    def gathering(self) -> dict[str, nn.Module]:
        """Modules that compute with parameters other than their own, which FSDP2 has gathered, by canonical path."""
        modules = self.root.named_modules()
        return {canonical_path(name): module for name, module in modules if is_fully_sharded(module)}

    def first_name(self, path: str) -> str:
        """The path under which a parameter is filed that has this one."""
        return self.tied.get(path, path)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What autograd differentiates by for the selected parameters."""
        flat = {member.path: one.tensor for one in self.layout.flat for member in one.members}
        found = (flat.get(path, parameter) for path, parameter in self.parameters.items())
        return tuple({id(leaf): leaf for leaf in found}.values())

    def describe(self) -> dict[str, Any]:
        """Names, shapes and dtypes for `rank.json`."""
        return {
            "model": ", ".join(type(one).__qualname__ for one in self._models),
            "modules": {path_in_whole(path): type(module).__qualname__ for path, module in self.modules.items()},
            "parameters": {path: _describe_tensor(p, self.shapes.get(path)) for path, p in self.parameters.items()},
            "buffers": {path: _describe_tensor(buffer) for path, buffer in present_buffers(self.root, self.buffers)},
            "tied": dict(self.tied),
        }

    @property
    def _models(self) -> Sequence[nn.Module]:
        return roots_of(self.root) if isinstance(self.root, Together) else roots_of(self.root)[:1]


_ScriptModule: type[nn.Module] = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]
_OF_MINDSPORE = "A MindSpore training is recorded with traindiff.mindspore.record(path, cell, optimizer)."
_OPTIMIZER = "Give the optimizer whose step() the training calls, or leave it out to have it found."


def find_targets(
    model: object,
    optimizer: Optimizers,
    *,
    select: Sequence[str],
    shards: Sequence[DeclaredShard] = (),
    called: Sequence[nn.Module] = (),
    operators: Sequence[str] = (),
    caller: str = "record",
) -> Targets:
    """Look up what `select` chooses of `model`.

    Args:
        model: The module that the training loop calls, several parts of one, or several by name.
        optimizer: What steps.
        select: Globs over canonical paths.
        shards: What is declared of plain tensors.
        called: What the training loop calls, where that is not the model, or each of the models, but something in it.
        operators: Globs over canonical paths of the modules whose operators are recorded.
        caller: The function to which the user gave these.

    Raises:
        ConfigError: `model` is not a module, `optimizer` is none, nothing is selected, a declaration in `shards`
            does not fit the model, or operators cannot be recorded.
    """
    problems: list[Problem] = []
    if isinstance(model, (list, tuple)) and model and all(isinstance(part, nn.Module) for part in model):
        model = Parts(model) if len(model) > 1 else model[0]
    if isinstance(model, Mapping):
        model = together(model, problems, caller)
    if isinstance(model, nn.Module) and not takes_hooks(model):
        problems.append(
            Problem(
                where=f"{caller}(model=...)",
                what="is a module that torch.jit.script has made, in which nothing can be observed.",
                fix="Train the module that torch.jit.script was given, and give that one.",
            )
        )
    if not isinstance(model, nn.Module) and not problems:
        problems.append(
            Problem(
                where=f"{caller}(model=...)",
                what=f"is {type_of(model)}, not a torch.nn.Module.",
                fix=_OF_MINDSPORE if is_of(model, "mindspore") else "Give the module that the training loop calls.",
            )
        )
    optimizers = _by_name(optimizer, problems, caller)
    if problems or not isinstance(model, nn.Module):
        raise ConfigError(f"{caller}(...)", problems, consequence="nothing was attached to the model")

    modules: dict[str, Any] = _named_modules(model)
    layout = find_layout(model, shards=shards, modules=modules)
    parameters = named_parameters(model, layout.flat)
    regions = regions_of_parameters(layout, parameters.tensors)
    every_name = [*parameters.tensors, *parameters.tied]
    selected = {parameters.first(path) for path in every_name if any(matches(glob, path) for glob in select)}
    buffers = _canonical({name: name for name, _ in model.named_buffers()})
    chosen_modules, chosen_buffers = (
        {path: item for path, item in found.items() if any(matches(glob, path) for glob in select)}
        for found in (modules, buffers)
    )
    chosen_parameters = {path: p for path, p in parameters.tensors.items() if path in selected}
    named = [*modules, *every_name, *buffers]
    unused = [pattern for pattern in select if not any(matches(pattern, path) for path in named)]
    if not chosen_modules and not chosen_parameters:
        raise ConfigError(
            "record(...)",
            [_no_match(select, [*modules, *parameters.tensors])],
            consequence="nothing was attached to the model",
        )
    if unused:
        patterns = " or ".join(map(repr, unused))
        message = (
            f"record(select=...): no module, parameter or buffer of the model matches {patterns}. "
            f"{_near(unused, named)}Paths look like: {_examples(named)}"
        )
        warnings.warn(message, TraindiffWarning, stacklevel=level_of_caller())
    followed: Mapping[str, Optimizer | EngineOptimizer] = optimizers
    for engine in ENGINES:
        followed = engine.optimizers(model, followed, parameters.ids)
    found = Targets(
        select=tuple(select),
        root=model,
        roots=tuple(called) or roots_of(model),
        modules=chosen_modules,
        parameters=chosen_parameters,
        shapes={**parameters.shapes, **{path: region.shape for path, region in regions.items()}},
        buffers=chosen_buffers,
        names=parameters.ids,
        paths=frozenset(parameters.tensors),
        layout=replace(layout, parameters=regions),
        tied=parameters.tied,
        optimizers=followed,
        zoomed=zoomed_modules(operators, modules, model) if operators else {},
    )
    warn_of_other_models(
        {name: (type(one).__name__, _held(one)) for name, one in followed.items() if isinstance(one, Optimizer)},
        found.paths,
        is_ours=lambda parameter: found.pieces_of(parameter) is not None,
        is_frozen=not any(parameter.requires_grad for parameter in parameters.tensors.values()),
        caller=caller,
    )
    return found


def takes_hooks(model: nn.Module) -> bool:
    """Whether hooks of modules can be put on what the training calls; torch.jit.script makes modules without."""
    return not any(isinstance(one, _ScriptModule) for one in roots_of(model))


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by canonical path. What several parts of a model have is by the names of the parts, too."""
    if isinstance(model, Together):
        return {path: module for path, module in _canonical(dict(model.named_modules())).items() if path}
    if not isinstance(model, Parts):
        return _canonical(dict(model.named_modules()))
    found: dict[str, nn.Module] = {}
    for name, part in model.named_children():
        for path, module in _canonical(dict(part.named_modules())).items():
            found[path if path and path not in found else f"{name}.{path}".rstrip(".")] = module
    return found


def _canonical(by_path: Mapping[str, Any]) -> dict[str, Any]:
    return {canonical: by_path[path] for path, canonical in canonical_paths(by_path).items()}


def _by_name(optimizer: object, problems: list[Problem], caller: str) -> dict[str, Optimizer]:
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        named = dict(optimizer)
    elif isinstance(optimizer, Sequence) and not isinstance(optimizer, str):
        named = {f"optimizer[{index}]": one for index, one in enumerate(optimizer)}
    else:
        named = {"optimizer": optimizer}
    named = {name: unprepared(one) for name, one in named.items()}
    problems += [
        Problem(
            where=f"{caller}(optimizer=...), {name}",
            what=f"is {type_of(one)}, not a torch.optim.Optimizer.",
            fix=_OF_MINDSPORE if is_of(one, "mindspore") else _OPTIMIZER,
        )
        for name, one in named.items()
        if not hasattr(one, "register_step_pre_hook") and not is_engine_optimizer(one)
    ]
    return named


def _describe_tensor(tensor: Tensor, shape: tuple[int, ...] | None = None) -> dict[str, Any]:
    return {
        "shape": list(shape_of(tensor) if shape is None else shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "requires_grad": tensor.requires_grad,
    }


def _no_match(select: Sequence[str], paths: Sequence[str]) -> Problem:
    return Problem(
        where=f"record(select={list(select)!r})",
        what=f"matches none of the model's {len(paths)} modules and parameters.",
        fix=f"{_near(select, paths)}Paths look like: {_examples(paths)} Use '*' for all of them.",
    )


def _examples(paths: Sequence[str]) -> str:
    """A few paths, as examples of what there is to select."""
    named = [path for path in paths if path] or [ROOT]
    return ", ".join(named[:3]) + (", ..." if len(named) > 3 else ".")


def _near(patterns: Sequence[str], paths: Sequence[str]) -> str:
    """The path that a misspelt pattern may have meant."""
    near = [match for pattern in patterns for match in get_close_matches(pattern.rstrip("*."), paths, n=1)]
    return f"Did you mean {near[0]!r}? " if near else ""
