"""What of a model is observed, under which canonical names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.engines.layout import Layout, find_layout
from traindiff.errors import ConfigError, Problem, TraindiffWarning
from traindiff.kernels.torch_arrays import shape_of
from traindiff.shard import Piece
from traindiff.site import ROOT, canonical_paths, matches

Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None
"""One optimizer, several, several by name, or None to find them when they first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The modules, parameters, buffers and optimizers that a session observes.

    Attributes:
        root: The module that the training loop calls.
        modules: Selected modules by canonical path.
        parameters: Selected parameters by canonical path, tied ones under their first name,
            whichever of their names was selected.
        buffers: What `root.get_buffer` calls the selected buffers, by canonical path.
        names: Canonical path of every parameter of the model, selected or not, by id.
        layout: How the engine lays tensors out over ranks.
        tied: Canonical path of a parameter by each of its further names.
        optimizers: Tracked optimizers by name, the one that counts steps first.
    """

    root: nn.Module
    modules: Mapping[str, nn.Module]
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, str]
    names: Mapping[int, str]
    layout: Layout
    tied: Mapping[str, str]
    optimizers: Mapping[str, Optimizer]

    @property
    def primary(self) -> str:
        """Name of the optimizer that counts the steps of forward and backward passes."""
        return next(iter(self.optimizers), "optimizer")

    @property
    def pieces(self) -> dict[int, tuple[Piece, ...]]:
        """What each parameter that an optimizer may hold has of the model's, by id."""
        whole = {number: (Piece(path=path),) for number, path in self.names.items()}
        return {**whole, **self.layout.pieces}

    def describe(self) -> dict[str, Any]:
        """Names, shapes and dtypes for `rank.json`."""
        return {
            "model": type(self.root).__qualname__,
            "modules": {path: type(module).__qualname__ for path, module in self.modules.items()},
            "parameters": {path: _describe_tensor(p) for path, p in self.parameters.items()},
            "buffers": {path: _describe_tensor(self.root.get_buffer(b)) for path, b in self.buffers.items()},
            "tied": dict(self.tied),
        }


def find_targets(model: object, optimizer: Optimizers, *, select: Sequence[str]) -> Targets:
    """Look up what `select` chooses of `model`.

    Raises:
        ConfigError: `model` is not a module, `optimizer` is none, or nothing is selected.
    """
    problems: list[Problem] = []
    if not isinstance(model, nn.Module):
        problems.append(
            Problem(
                where="record(model=...)",
                what=f"is a {type(model).__name__}, not a torch.nn.Module.",
                fix="Give the module that the training loop calls.",
            )
        )
    optimizers = _by_name(optimizer, problems)
    if problems or not isinstance(model, nn.Module):
        raise ConfigError("record(...)", problems, consequence="nothing was attached to the model")

    modules = _canonical(dict(model.named_modules()))
    every_name = _canonical(dict(model.named_parameters(remove_duplicate=False)))
    first_name: dict[int, str] = {}
    for path, parameter in every_name.items():
        first_name.setdefault(id(parameter), path)
    parameters = {path: p for path, p in every_name.items() if first_name[id(p)] == path}
    selected = {id(p) for path, p in every_name.items() if any(matches(glob, path) for glob in select)}
    buffers = _canonical({name: name for name, _ in model.named_buffers()})
    chosen_modules, chosen_buffers = (
        {path: item for path, item in found.items() if any(matches(glob, path) for glob in select)}
        for found in (modules, buffers)
    )
    chosen_parameters = {path: p for path, p in parameters.items() if id(p) in selected}
    named = [*modules, *every_name, *buffers]
    unused = [pattern for pattern in select if not any(matches(pattern, path) for path in named)]
    if not chosen_modules and not chosen_parameters:
        raise ConfigError(
            "record(...)",
            [_no_match(select, [*modules, *parameters])],
            consequence="nothing was attached to the model",
        )
    if unused:
        says = (
            f"record(select=...): {', '.join(map(repr, unused))} matches no module, parameter or buffer of the model."
        )
        warnings.warn(says, TraindiffWarning, stacklevel=3)
    return Targets(
        root=model,
        modules=chosen_modules,
        parameters=chosen_parameters,
        buffers=chosen_buffers,
        names=first_name,
        layout=find_layout(model),
        tied={path: first_name[id(p)] for path, p in every_name.items() if first_name[id(p)] != path},
        optimizers=optimizers,
    )


def _canonical(by_path: Mapping[str, Any]) -> dict[str, Any]:
    return {canonical: by_path[path] for path, canonical in canonical_paths(by_path).items()}


def _by_name(optimizer: object, problems: list[Problem]) -> dict[str, Optimizer]:
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        named = dict(optimizer)
    elif isinstance(optimizer, Sequence) and not isinstance(optimizer, str):
        named = {f"optimizer[{index}]": one for index, one in enumerate(optimizer)}
    else:
        named = {"optimizer": optimizer}
    problems += [
        Problem(
            where=f"record(optimizer=...), {name}",
            what=f"is a {type(one).__name__}, not a torch.optim.Optimizer.",
            fix="Give the optimizer whose step() the training calls, or leave it out to have it found.",
        )
        for name, one in named.items()
        if not hasattr(one, "register_step_pre_hook")
    ]
    return named


def _describe_tensor(tensor: Tensor) -> dict[str, Any]:
    return {
        "shape": list(shape_of(tensor)),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "requires_grad": tensor.requires_grad,
    }


def _no_match(select: Sequence[str], paths: Sequence[str]) -> Problem:
    named = [path for path in paths if path] or [ROOT]
    examples = ", ".join(named[:3]) + (", ..." if len(named) > 3 else ".")
    return Problem(
        where=f"record(select={list(select)!r})",
        what=f"matches none of the model's {len(paths)} modules and parameters.",
        fix=f"Paths look like: {examples} Use '*' for all of them.",
    )
