"""What of a MindSpore training is observed, under which canonical names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mindspore import Parameter, nn

from traindiff.core.site import ROOT, canonical_paths, matches
from traindiff.errors import ConfigError, Problem, type_of
from traindiff.observe.common.user_input import warn_of_other_models
from traindiff.observe.mindspore.sights import Followed, Sight, follow

Optimizers = nn.Cell | Sequence[nn.Cell] | Mapping[str, nn.Cell]
"""One optimizer, several, or several by name."""

_STATISTICS = ("moving_mean", "moving_variance")
"""What MindSpore's normalizations keep as parameters, and torch's as buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The cells, parameters and optimizers that a session observes.

    Attributes:
        select: Globs over canonical paths: what is observed.
        root: The cell that the training calls; None where only optimizers are observed.
        cells: Selected cells by canonical path.
        parameters: All parameters, of the cell and of the optimizers, by canonical path.
        optimizers: Followed optimizers, the one that counts the steps of forward passes first.
    """

    select: Sequence[str]
    root: nn.Cell | None
    cells: Mapping[str, nn.Cell]
    parameters: Mapping[str, Parameter]
    optimizers: tuple[Followed, ...]

    def selects(self, path: str) -> bool:
        """Whether what has this path is observed."""
        return any(matches(glob, path) for glob in self.select)

    def describe(self) -> dict[str, Any]:
        """Names, shapes and dtypes for `rank.json`."""
        chosen = {path: one for path, one in self.parameters.items() if self.selects(path)}
        described = {path: _describe(one) for path, one in chosen.items() if not _is_statistic(one)}
        return {
            "model": type(self.root).__qualname__ if self.root is not None else "",
            "modules": {path: type(cell).__qualname__ for path, cell in self.cells.items()},
            "parameters": described,
            "buffers": {path: _describe(one) for path, one in chosen.items() if _is_statistic(one)},
            "tied": {},
            "optimizers": [followed.describe() for followed in self.optimizers],
        }


def find_targets(cell: object, optimizer: object, *, select: Sequence[str]) -> Targets:
    """Look up what `select` chooses.

    Raises:
        ConfigError: `cell` is no cell, `optimizer` no optimizer of MindSpore's, or nothing is selected.
    """
    problems: list[Problem] = []
    if cell is not None and not isinstance(cell, nn.Cell):
        fix = "Give the cell that computes the model's output, or None to observe the optimizer alone."
        what = f"is {type_of(cell)}, not a mindspore.nn.Cell."
        problems.append(Problem(where="record(cell=...)", what=what, fix=fix))
    optimizers = _by_name(optimizer, problems)
    if problems:
        raise ConfigError("record(...)", problems, consequence="nothing was attached to the model")

    root = cell if isinstance(cell, nn.Cell) else None
    ours = {id(one) for held in optimizers.values() for one in held.parameters}
    state = {id(one) for held in optimizers.values() for _, one in held.parameters_and_names()} - ours
    parameters = _parameters(root, optimizers, without=state)
    cells = _cells(root)
    named = [*cells, *parameters]
    chosen = {path: one for path, one in cells.items() if any(matches(glob, path) for glob in select)}
    if not any(matches(glob, path) for glob in select for path in named):
        raise ConfigError("record(...)", [_no_match(select, named)], consequence="nothing was attached to the model")
    found = Targets(select=tuple(select), root=root, cells=chosen, parameters=parameters, optimizers=())
    paths = {id(parameter): path for path, parameter in parameters.items()}
    followed: list[Followed] = []
    for name, held in optimizers.items():
        first = not followed
        followed.append(
            follow(
                name, held, paths=[paths[id(one)] for one in held.parameters], selects=found.selects,
                before=_as_found(found) if first else (), after=_statistics(found) if first else (),
            )
        )  # fmt: skip
    if root is not None:
        of_cell = _parameters(root, {}, without=state)
        in_cell = {id(one): path for path, one in of_cell.items()}
        warn_of_other_models(
            {name: (type(held).__name__, held.parameters) for name, held in optimizers.items()},
            in_cell.values(),
            is_ours=lambda parameter: id(parameter) in in_cell,
            is_frozen=not any(one.requires_grad for one in of_cell.values()),
            caller="record",
        )
    return Targets(select=tuple(select), root=root, cells=chosen, parameters=parameters, optimizers=tuple(followed))


def _parameters(root: nn.Cell | None, optimizers: Mapping[str, nn.Cell], *, without: set[int]) -> dict[str, Parameter]:
    """Parameters by canonical path: that in the cell, or their own name where they are not in it."""
    named = {} if root is None else {path: one for path, one in root.parameters_and_names() if id(one) not in without}
    canonical = canonical_paths(named)
    found = {canonical[path]: one for path, one in named.items() if path in canonical}
    there = {id(one) for one in found.values()}
    for held in optimizers.values():
        for one in held.parameters:
            if id(one) not in there:
                there.add(id(one))
                found[_free(one.name, found)] = one
    return found


def _free(name: str, taken: Mapping[str, object]) -> str:
    """The name, or, where another parameter has it, the name with a number."""
    number, free = 1, name
    while free in taken:
        number, free = number + 1, f"{name}[{number}]"
    return free


def _cells(root: nn.Cell | None) -> dict[str, nn.Cell]:
    if root is None:
        return {}
    named = {path: cell for path, cell in root.cells_and_names() if not _is_optimizer(cell)}
    canonical = canonical_paths(named)
    return {canonical[path]: cell for path, cell in named.items() if path in canonical}


def _as_found(targets: Targets) -> list[Sight]:
    """Parameters and buffers, as a step finds them."""
    return [
        Sight(
            parameter=one,
            phase="param",
            paths=(path,),
            slot="buffer" if _is_statistic(one) else "value",
            stage="before",
        )
        for path, one in targets.parameters.items()
        if targets.selects(path)
    ]


def _statistics(targets: Targets) -> list[Sight]:
    """Buffers, as a step leaves them."""
    return [
        Sight(parameter=one, phase="param", paths=(path,), slot="buffer")
        for path, one in targets.parameters.items()
        if targets.selects(path) and _is_statistic(one)
    ]


def _is_statistic(parameter: Parameter) -> bool:
    return parameter.name.rpartition(".")[2] in _STATISTICS and not parameter.requires_grad


def _is_optimizer(cell: object) -> bool:
    """Whether it is an optimizer; MindSpore has two families of them with nothing but cells above them."""
    return isinstance(cell, nn.Cell) and hasattr(cell, "parameters") and not callable(cell.parameters)


def _by_name(optimizer: object, problems: list[Problem]) -> dict[str, nn.Cell]:
    if isinstance(optimizer, Mapping):
        named = dict(optimizer)
    elif isinstance(optimizer, (list, tuple)):
        named = {f"optimizer[{index}]": one for index, one in enumerate(optimizer)}
    else:
        named = {"optimizer": optimizer}
    problems += [
        Problem(
            where=f"record(optimizer=...), {name}",
            what=f"is {type_of(one)}, not one of MindSpore's optimizers.",
            fix="Give the optimizer of mindspore.nn, mindspore.experimental.optim or mindspore.mint.optim that the "
            "training calls: its calls are the steps, and gradients are seen on their way into it.",
        )
        for name, one in named.items()
        if not _is_optimizer(one)
    ]
    return named


def _describe(parameter: Parameter) -> dict[str, Any]:
    return {
        "shape": list(parameter.shape),
        "dtype": str(parameter.dtype).lower(),
        "requires_grad": bool(parameter.requires_grad),
    }


def _no_match(select: Sequence[str], paths: Sequence[str]) -> Problem:
    near = [match for pattern in select for match in get_close_matches(pattern.rstrip("*."), paths, n=1)]
    named = [path for path in paths if path] or [ROOT]
    examples = ", ".join(named[:3]) + (", ..." if len(named) > 3 else ".")
    suggestion = f"Did you mean {near[0]!r}? " if near else ""
    return Problem(
        where=f"record(select={list(select)!r})",
        what=f"matches none of the model's {len(paths)} cells and parameters.",
        fix=f"{suggestion}Paths look like: {examples} Use '*' for all of them.",
    )
