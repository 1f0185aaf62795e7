"""The modules, parameters, buffers and optimizers that a session observes, under canonical names."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.core.kernels.torch_arrays import shape_of
from traindiff.core.shards import DeclaredShard, Piece
from traindiff.core.site import canonical_path, canonical_paths, path_in_whole
from traindiff.core.torch_compat.training import (
    STEP_POST_HOOKS,
    buffers_by_name,
    is_fully_sharded,
    left_to_each_rank,
    modules_by_name,
    parameters_in,
)
from traindiff.errors import ConfigError, Problem, TraindiffWarning, level_of_caller, type_of
from traindiff.observe.common.containers import is_of
from traindiff.observe.common.user_input import (
    examples,
    is_selected,
    near,
    no_match,
    optimizers_by_name,
    warn_of_other_models,
)
from traindiff.observe.torch.hooks.model_state import master_weights, present_buffers
from traindiff.observe.torch.session.models import (
    ModelParts,
    NamedModels,
    named_models,
    named_parameters,
    roots_of,
    takes_hooks,
    trained_parts,
    unwrapped,
    zoomed_modules,
)
from traindiff.observe.torch.sharding.deepspeed_optimizer import EngineOptimizer, is_engine_optimizer
from traindiff.observe.torch.sharding.layout import Layout, find_layout, regions_of_parameters
from traindiff.observe.torch.sharding.registry import ENGINES, reduction_dtypes

Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None
"""One optimizer, several, several by name, or None to find them when they first step."""

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
"""One model, several parts of one, or several models by name."""


_PLAIN = (Tensor, nn.Parameter)


@lru_cache(maxsize=1 << 16)
def _all_of(path: str) -> tuple[Piece, ...]:
    return (Piece(path=path),)


@dataclass(slots=True)
class Changes:
    """Counts changes."""

    number: int = 0


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The modules, parameters, buffers and optimizers that a session observes.

    Attributes:
        select: Globs over the canonical paths that are observed.
        root: The module that the training loop calls, or the one that holds the modules which it calls.
        roots: The modules that the loop calls: the root, or some modules in it.
        modules: Selected modules by canonical path.
        parameters: The tensors that hold the selected parameters, by canonical path. A tied parameter is under its
            first name, whichever of its names was selected.
        shapes: Global shapes of parameters by path, where they differ from those of the tensors.
        buffers: Names for `root.get_buffer` of the selected buffers, by canonical path.
        names: Canonical path of every parameter of the model, selected or not, and of the tensors that the engine
            has put in their place, by id.
        paths: Canonical paths of all parameters of the model, selected or not.
        layout: How the engine lays tensors out over ranks.
        tied: Canonical path of a parameter by each of its further names.
        optimizers: Followed optimizers by name, first the one that counts steps.
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

    @cached_property
    def changes(self) -> Changes:
        """Changes of `names` and `parameters` while the training runs."""
        return Changes()

    @cached_property
    def root_paths(self) -> dict[int, str]:
        """Canonical path of each root, by id. Parts of one model have the path of the model.

        The mapping changes when the training replaces a root.
        """
        if isinstance(self.root, ModelParts):
            return {id(root): "" for root in self.roots}
        paths = {id(module): canonical_path(name) for name, module in modules_by_name(self.root).items()}
        return {id(root): paths.get(id(root), "") for root in self.roots}

    @cached_property
    def parts(self) -> dict[str, nn.Module]:
        """The modules that the loop may call in place of the model: its outermost trained parts, by path."""
        if len(self.roots) > 1:
            return {}  # the called modules are known
        parts = {id(one) for one in trained_parts(unwrapped(self.root))}
        modules = modules_by_name(self.root)
        return {canonical_path(name): module for name, module in modules.items() if id(module) in parts}

    @property
    def primary(self) -> str:
        """Name of the optimizer that counts the steps of forward and backward passes."""
        return next(iter(self.optimizers), "optimizer")

    def selects(self, path: str) -> bool:
        """True if the parameter with this path is observed; an optimizer may hold parameters of no model."""
        if path in self.paths:
            return path in self.parameters
        return is_selected(self.select, path)

    def pieces_of(self, parameter: Tensor, size: int | None = None) -> tuple[Piece, ...] | None:
        """The pieces of the model's parameters that a parameter of an optimizer or of autograd holds; None for others.

        The tuple is empty if this rank holds no elements of them just now.

        Args:
            parameter: The tensor.
            size: Number of elements of its gradient, to get the pieces of the gradient.
        """
        if (pieces := self.layout.flat.pieces_of(parameter, size)) is not None:
            return pieces
        path = self.names.get(id(parameter))
        return None if path is None else _all_of(path)

    def master_ids(self) -> set[int]:
        """Ids of the model's master weights, which are observed beside the parameters that are copied from them."""
        return {id(one) for one in map(master_weights, self.parameters.values()) if one is not None}

    def adopt(self, path: str, parameter: Tensor) -> tuple[Piece, ...]:
        """File a parameter of an optimizer that is none of the model's; returns the piece that is all of it.

        It may belong to no module at all, e.g. a temperature that is trained beside the model.
        """
        names: Any = self.names
        parameters: Any = self.parameters
        if type(parameter) in _PLAIN and parameter.is_leaf:
            names.pop(self._adopted.get(path), None)  # of a tensor whose place this one has taken
            names[id(parameter)] = path
            self._adopted[path] = id(parameter)
            if is_selected(self.select, path):
                parameters[path] = parameter
            self.changes.number += 1
        return _all_of(path)

    def let_go(self, modules: Collection[str], parameters: Collection[int]) -> None:
        """Observe some modules no more, given by path, nor some parameters, given by id.

        They are still described, since earlier steps have them.
        """
        self._described.update(self.describe())
        paths = {path for path, one in self.parameters.items() if id(one) in parameters}
        gone: tuple[tuple[Any, Collection[Any]], ...] = (
            (self.modules, modules), (self.parts, modules), (self.zoomed, modules), (self.parameters, paths),
            (self.names, parameters),
        )  # fmt: skip
        for held, keys in gone:
            for key in keys:
                held.pop(key, None)
        self.changes.number += 1

    @property
    def of_no_module(self) -> set[int]:
        """Ids of the parameters of optimizers that are none of the model's."""
        return {*self._adopted.values()}

    @cached_property
    def _described(self) -> dict[str, Any]:
        """What was described when parts of the model were let go of."""
        return {}

    @cached_property
    def _adopted(self) -> dict[str, int]:
        """By path: ids of the parameters that are none of the model's."""
        return {}

    @cached_property
    def gathering(self) -> dict[str, nn.Module]:
        """Modules whose parameters FSDP2 replaces by gathered ones to compute with, by canonical path."""
        modules = modules_by_name(self.root)
        return {canonical_path(name): module for name, module in modules.items() if is_fully_sharded(module)}

    @property
    def several_roots(self) -> bool:
        """True if the training loop calls several modules, whose inputs may be outputs of others."""
        return len(set(self.root_paths.values())) > 1

    @property
    def leaf_ids(self) -> Collection[int]:
        """Ids of all parameters, and of those that FSDP2 has swapped in: the possible leaves of the graph."""
        if not self.gathering:
            return self.names.keys()
        return self.names.keys() | {id(one) for module in self.gathering.values() for one in parameters_in(module)}

    def first_name(self, path: str) -> str:
        """The path under which the parameter with this path is filed."""
        return self.tied.get(path, path)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that are leaves of the graph for the selected parameters."""
        flat = {member.path: one.tensor for one in self.layout.flat for member in one.members}
        found = (flat.get(path, parameter) for path, parameter in self.parameters.items())
        return tuple({id(leaf): leaf for leaf in found}.values())

    def describe(self) -> dict[str, Any]:
        """Names, shapes and dtypes for `rank.json`, also of what the model had before."""
        now = self._describe()
        for name, before in self._described.items():
            if isinstance(before, dict):
                now[name] = before | now[name]
            elif isinstance(before, list):
                now[name] = [*dict.fromkeys([*before, *now[name]])]
        return now

    def _describe(self) -> dict[str, Any]:
        own = {id(parameter) for root in self.roots for parameter in left_to_each_rank(root)}
        reduced_in = reduction_dtypes(self.root, self.parameters)
        return {
            "model": ", ".join(type(one).__qualname__ for one in self._models),
            "modules": {path_in_whole(path): type(module).__qualname__ for path, module in self.modules.items()},
            "holders": [path_in_whole(path) for path, module in self.modules.items() if _is_holder(module)],
            "parameters": {
                path: _describe_tensor(one, self.shapes.get(path))
                | ({"not_reduced": True} if id(one) in own else {})
                | ({"reduced_in": reduced_in[path]} if path in reduced_in else {})
                for path, one in self.parameters.items()
            },
            "buffers": {path: _describe_tensor(buffer) for path, buffer in present_buffers(self.root, self.buffers)},
            "tied": dict(self.tied),
        }

    @property
    def _models(self) -> Sequence[nn.Module]:
        return roots_of(self.root) if isinstance(self.root, NamedModels) else roots_of(self.root)[:1]


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
    """Look up what `select` matches in `model`.

    Args:
        model: The module that the training loop calls, several parts of one, or several by name.
        optimizer: The optimizers that step.
        select: Globs over canonical paths.
        shards: Declarations of how ranks divide plain tensors.
        called: The modules that the training loop calls, if they are not the model, or the models, but inside it.
        operators: Globs over canonical paths of the modules whose operators are recorded.
        caller: The function to which the user gave these arguments.

    Raises:
        ConfigError: `model` is not a module, `optimizer` is not an optimizer, nothing is selected, a declaration in
            `shards` does not fit the model, or operators cannot be recorded.
    """
    problems: list[Problem] = []
    if isinstance(model, (list, tuple)) and model and all(isinstance(part, nn.Module) for part in model):
        model = ModelParts(model) if len(model) > 1 else model[0]
    if isinstance(model, Mapping):
        model = named_models(model, problems, caller)
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
    optimizers = _checked(optimizer, problems, caller)
    if problems or not isinstance(model, nn.Module):
        raise ConfigError(f"{caller}(...)", problems, consequence="nothing was attached to the model")

    modules: dict[str, Any] = _named_modules(model)
    layout = find_layout(model, shards=shards, modules=modules)
    parameters = named_parameters(model, layout.flat)
    regions = regions_of_parameters(layout, parameters.tensors)
    every_name = [*parameters.tensors, *parameters.tied]
    selected = {parameters.tied.get(path, path) for path in every_name if is_selected(select, path)}
    buffers = _canonical({name: name for name in buffers_by_name(model)})
    chosen_modules, chosen_buffers = (
        {path: item for path, item in found.items() if is_selected(select, path)} for found in (modules, buffers)
    )
    chosen_parameters = {path: p for path, p in parameters.tensors.items() if path in selected}
    named = [*modules, *every_name, *buffers]
    unused = [pattern for pattern in select if not any(is_selected([pattern], path) for path in named)]
    if not chosen_modules and not chosen_parameters:
        raise ConfigError(
            "record(...)",
            [no_match(select, [*modules, *parameters.tensors], kinds="modules and parameters")],
            consequence="nothing was attached to the model",
        )
    if unused:
        patterns = " or ".join(map(repr, unused))
        message = (
            f"record(select=...): no module, parameter or buffer of the model matches {patterns}. "
            f"{near(unused, named)}Paths look like: {examples(named)}"
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
    masters = {id(one) for one in map(master_weights, parameters.tensors.values()) if one is not None}
    warn_of_other_models(
        {name: (type(one).__name__, _held(one)) for name, one in followed.items() if isinstance(one, Optimizer)},
        found.paths,
        is_ours=lambda parameter: found.pieces_of(parameter) is not None or id(parameter) in masters,
        is_frozen=not any(parameter.requires_grad for parameter in parameters.tensors.values()),
        caller=caller,
    )
    return found


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by canonical path; with several parts of a model, also by the names of the parts."""
    if isinstance(model, NamedModels):
        return {path: module for path, module in _canonical(modules_by_name(model)).items() if path}
    if not isinstance(model, ModelParts):
        return _canonical(modules_by_name(model))
    found: dict[str, nn.Module] = {}
    for name, part in model.named_children():
        for path, module in _canonical(modules_by_name(part)).items():
            found[path if path and path not in found else f"{name}.{path}".rstrip(".")] = module
    return found


def _canonical(by_path: Mapping[str, Any]) -> dict[str, Any]:
    return {canonical: by_path[path] for path, canonical in canonical_paths(by_path).items()}


def _checked(optimizer: object, problems: list[Problem], caller: str) -> dict[str, Optimizer]:
    """The optimizers by name; adds a problem for each that is none."""
    named = {} if optimizer is None else optimizers_by_name(optimizer)
    named = {name: _unprepared(one) for name, one in named.items()}
    problems += [
        Problem(where=f"{caller}(optimizer=...), {name}", what=what, fix=fix)
        for name, one in named.items()
        if not is_engine_optimizer(one) and not hasattr(one, STEP_POST_HOOKS)
        for what, fix in [_why_not(one)]
    ]
    return named


def _why_not(optimizer: Any) -> tuple[str, str]:
    """Why something cannot be followed as an optimizer, and what to do instead."""
    if isinstance(optimizer, Optimizer):
        what = f"is {type_of(optimizer)}, whose class has not called torch.optim.Optimizer.__init__."
        return what, "Give the optimizer whose step() it calls, or call super().__init__() in its class."
    what = f"is {type_of(optimizer)}, not a torch.optim.Optimizer."
    return what, _OF_MINDSPORE if is_of(optimizer, "mindspore") else _OPTIMIZER


def _unprepared(optimizer: Any) -> Any:
    """The optimizer inside a wrapper, which calls its `step`; any other optimizer itself.

    Wrappers derive from torch's class and have none of its hooks, as those of Opacus and `PostLocalSGDOptimizer`, or
    share them, as Accelerate's and Lightning's. Imports none of these libraries.
    """
    shares = type(optimizer).__module__.partition(".")[0] in ("accelerate", "lightning", "pytorch_lightning")
    if not isinstance(optimizer, Optimizer) or not (shares or STEP_POST_HOOKS not in vars(optimizer)):
        return optimizer
    inner = next((one for one in vars(optimizer).values() if isinstance(one, Optimizer)), None)
    return optimizer if inner is None or inner is optimizer else _unprepared(inner)


def _is_holder(module: nn.Module) -> bool:
    """True if a module has no forward pass, so that what it holds is used by the module around it."""
    return getattr(type(module), "forward", None) is nn.Module.forward and "forward" not in vars(module)


def _describe_tensor(tensor: Tensor, shape: tuple[int, ...] | None = None) -> dict[str, Any]:
    return {
        "shape": list(shape_of(tensor) if shape is None else shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "requires_grad": tensor.requires_grad,
    }
