"""What a model calls its parameters, whatever an engine has put in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.optim import Optimizer

from traindiff.core.site import ROOT, WRAPPERS, canonical_paths, matches, part_name
from traindiff.core.torch_compat.execution import is_compiled
from traindiff.errors import ConfigError, Problem, type_of
from traindiff.observe.torch.sharding.flat_parameters import FlatParameters
from traindiff.observe.torch.sharding.registry import ENGINES


def zoomed_modules(patterns: Sequence[str], modules: Mapping[str, nn.Module], root: nn.Module) -> dict[str, nn.Module]:
    """The modules that patterns choose, and all that these hold.

    Args:
        patterns: Globs over canonical paths.
        modules: All modules of the model by canonical path.
        root: The model, wrapped or not.

    Returns:
        By canonical path, in the order of `modules`.

    Raises:
        ConfigError: A pattern matches no module, or a part of what was chosen is compiled.
    """
    problems = [
        Problem(
            where=f"record(operators={pattern!r})",
            what=f"matches none of the model's {len(modules)} modules.",
            fix=f"{_near(pattern, modules)}Modules are called like: {_examples(modules)}",
        )
        for pattern in patterns
        if not any(matches(pattern, path) for path in modules)
    ]
    chosen = [path for path in modules if any(matches(pattern, path) for pattern in patterns)]
    found = {path: module for path, module in modules.items() if any(_holds(outer, path) for outer in chosen)}
    if _is_partly_compiled(found, root):
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


def _is_partly_compiled(found: Mapping[str, nn.Module], root: nn.Module) -> bool:
    """Whether one of the modules is compiled, or a part of what is."""
    compiled = (one for module in root.modules() if is_compiled(module) for one in module.modules())
    return not {id(module) for module in found.values()}.isdisjoint(map(id, compiled))


def _near(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    near = get_close_matches(pattern.rstrip("*."), list(modules), n=1)
    return f"Did you mean {near[0]!r}? " if near else ""


def _examples(modules: Mapping[str, nn.Module]) -> str:
    named = [path for path in modules if path] or [ROOT]
    return ", ".join(named[:3]) + (", ..." if len(named) > 3 else ".")


_LIBRARIES = ("accelerate", "lightning", "pytorch_lightning")


def unprepared(optimizer: Any) -> Any:
    """The optimizer inside one that Accelerate or Lightning has prepared, which steps when it is time; else itself.

    Their wrappers have torch's class for a base and none of its hooks, or share them. Imports none of the libraries.
    """
    if type(optimizer).__module__.partition(".")[0] not in _LIBRARIES:
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


_EMPTY = nn.Module()


class Parts(nn.Module):
    """Holds modules that are called one by one, and adds nothing to the names of what is in them.

    Args:
        parts: The modules, each with the names that it has in the whole model.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(part_name(number), part)


class Together(nn.Module):
    """Holds several models of one training, e.g. the generator and the discriminator of a GAN.

    Args:
        models: The models by name; paths in each begin with it.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)


def together(models: Mapping[Any, Any], problems: list[Problem], caller: str) -> Together | None:
    """Several models by name as one; None where that cannot be.

    Args:
        models: As the user gave them.
        problems: Receives what is wrong with them.
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
    return None if found else Together(models)


def can_be_name(name: str) -> bool:
    """Whether a model can have this name: paths begin with it, and it is an attribute of the module that holds it."""
    return bool(name) and "." not in name and name not in WRAPPERS and not hasattr(_EMPTY, name)


def roots_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """What the training calls of a model: the model itself, or each of several parts of it."""
    return tuple(model.children()) if isinstance(model, (Parts, Together)) else (model,)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameters:
    """The parameters of a model by canonical path.

    Attributes:
        tensors: What holds each of them (or a part of it, or several), by path; tied ones under their first name.
        tied: Path of a parameter by each of its further names.
        ids: Canonical path of every tensor that is a parameter to torch, by id: those that an engine made, too.
        shapes: Global shapes by path, where they are not those of the tensors.
    """

    tensors: Mapping[str, nn.Parameter]
    tied: Mapping[str, str]
    ids: Mapping[int, str]
    shapes: Mapping[str, tuple[int, ...]]

    def first(self, path: str) -> str:
        """The name under which a parameter is filed."""
        return self.tied.get(path, path)


def named_parameters(model: nn.Module, flat: FlatParameters) -> NamedParameters:
    """Look up the parameters of a model.

    Args:
        model: The module that the training loop calls.
        flat: What the engine has flattened.
    """
    found = dict(model.named_parameters(remove_duplicate=False))
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
