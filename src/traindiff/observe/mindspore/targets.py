"""The cells, parameters and optimizers that a session observes, and what is read before and after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mindspore import Parameter, nn

from traindiff.core.site import canonical_paths
from traindiff.errors import ConfigError, Problem, type_of
from traindiff.observe.common.user_input import is_selected, no_match, optimizers_by_name, warn_of_other_models
from traindiff.observe.mindspore.observations import read

Optimizers = nn.Cell | Sequence[nn.Cell] | Mapping[str, nn.Cell]
"""One optimizer, several, or several by name."""

_STATISTICS = ("moving_mean", "moving_variance")
"""Names of the parameters of MindSpore's normalizations that are buffers in torch."""

RATE = "lr"
"""Slot of learning rates."""

COUNT = "step"
"""Slot of the number of steps that an optimizer has taken; torch keeps it in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One of MindSpore's parameters, read at one moment of a step.

    Attributes:
        parameter: The parameter.
        phase: Phase that it is filed under.
        paths: Canonical paths that it is filed under: one, or more for a count of steps that parameters share.
        slot: Which tensor there.
        stage: Part of the phase.
    """

    parameter: Parameter
    phase: str
    paths: tuple[str, ...]
    slot: str
    stage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """An optimizer that is followed.

    Attributes:
        name: Name of the optimizer in the recording.
        optimizer: The optimizer.
        paths: Canonical paths of its parameters, in the order in which it is given their gradients.
        before: Parameters and buffers before a step; read only if the step before was not recorded.
        rates: Learning rates, before each step.
        schedule: Computes the learning rate of a step, if no parameter holds it.
        after: Parameters, buffers and state after a step.
        settings: Constant settings, by group and slot.
        groups: Canonical paths of the parameters of each group.
        factor: The factor in the gradients that it is given: its loss scale.
    """

    name: str
    optimizer: nn.Cell
    paths: tuple[str, ...]
    before: tuple[Sight, ...]
    rates: tuple[Sight, ...]
    schedule: Callable[[], Any] | None
    after: tuple[Sight, ...]
    settings: Mapping[tuple[int, str], float]
    groups: tuple[tuple[str, ...], ...]
    factor: float

    def describe(self) -> dict[str, Any]:
        """Name, type and groups of parameters, for `rank.json`."""
        return {
            "name": self.name,
            "type": type(self.optimizer).__qualname__,
            "groups": [list(group) for group in self.groups],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The cells, parameters and optimizers that a session observes.

    Attributes:
        select: Globs over the canonical paths that are observed.
        root: The cell that the training calls; None if only optimizers are observed.
        cells: Selected cells by canonical path.
        parameters: All parameters, of the cell and of the optimizers, by canonical path.
        optimizers: Followed optimizers, first the one that counts the steps of forward passes.
    """

    select: Sequence[str]
    root: nn.Cell | None
    cells: Mapping[str, nn.Cell]
    parameters: Mapping[str, Parameter]
    optimizers: tuple[Followed, ...] = ()

    def selects(self, path: str) -> bool:
        """True if the cell or parameter with this path is observed."""
        return is_selected(self.select, path)

    @property
    def selected(self) -> dict[str, Parameter]:
        """The selected parameters by canonical path."""
        return {path: one for path, one in self.parameters.items() if self.selects(path)}

    def describe(self) -> dict[str, Any]:
        """Names, shapes and dtypes for `rank.json`."""
        chosen = self.selected
        return {
            "model": type(self.root).__qualname__ if self.root is not None else "",
            "modules": {path: type(cell).__qualname__ for path, cell in self.cells.items()},
            "parameters": {path: _describe(one) for path, one in chosen.items() if not _is_statistic(one)},
            "buffers": {path: _describe(one) for path, one in chosen.items() if _is_statistic(one)},
            "tied": {},
            "optimizers": [followed.describe() for followed in self.optimizers],
        }


def find_targets(cell: object, optimizer: object, *, select: Sequence[str]) -> Targets:
    """Look up what `select` matches.

    Raises:
        ConfigError: `cell` is not a cell, `optimizer` not an optimizer of MindSpore, or nothing is selected.
    """
    problems: list[Problem] = []
    if cell is not None and not isinstance(cell, nn.Cell):
        fix = "Give the cell that computes the model's output, or None to observe the optimizer alone."
        what = f"is {type_of(cell)}, not a mindspore.nn.Cell."
        problems.append(Problem(where="record(cell=...)", what=what, fix=fix))
    optimizers = _checked(optimizer, problems)
    if problems:
        raise ConfigError("record(...)", problems, consequence="nothing was attached to the model")

    root = cell if isinstance(cell, nn.Cell) else None
    ours = {id(one) for held in optimizers.values() for one in held.parameters}
    state = {id(one) for held in optimizers.values() for _, one in held.parameters_and_names()} - ours
    parameters = _parameters(root, optimizers, without=state)
    cells = _cells(root)
    named = [*cells, *parameters]
    if not any(is_selected(select, path) for path in named):
        problem = no_match(select, named, kinds="cells and parameters")
        raise ConfigError("record(...)", [problem], consequence="nothing was attached to the model")
    chosen = {path: one for path, one in cells.items() if is_selected(select, path)}
    found = Targets(select=tuple(select), root=root, cells=chosen, parameters=parameters)
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
    return replace(found, optimizers=tuple(followed))


def _parameters(root: nn.Cell | None, optimizers: Mapping[str, nn.Cell], *, without: set[int]) -> dict[str, Parameter]:
    """Parameters by canonical path in the cell; a parameter outside the cell has its own name."""
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
    """The name; with a number if another parameter has it."""
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
    """Parameters and buffers before a step."""
    return [
        Sight(
            parameter=one, phase="param", paths=(path,), slot="buffer" if _is_statistic(one) else "value",
            stage="before",
        )
        for path, one in targets.selected.items()
    ]  # fmt: skip


def _statistics(targets: Targets) -> list[Sight]:
    """Buffers after a step."""
    return [
        Sight(parameter=one, phase="param", paths=(path,), slot="buffer")
        for path, one in targets.selected.items()
        if _is_statistic(one)
    ]


def _is_statistic(parameter: Parameter) -> bool:
    return parameter.name.rpartition(".")[2] in _STATISTICS and not parameter.requires_grad


def _is_optimizer(cell: object) -> bool:
    """True if this is an optimizer; MindSpore's two families of optimizers have only `Cell` in common."""
    return isinstance(cell, nn.Cell) and hasattr(cell, "parameters") and not callable(cell.parameters)


def _checked(optimizer: object, problems: list[Problem]) -> dict[str, nn.Cell]:
    """The optimizers by name; adds a problem for each that is none."""
    named = optimizers_by_name(optimizer)
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


_SLOTS = {
    "accum": "momentum_buffer",
    "adam_m": "exp_avg",
    "adam_v": "exp_avg_sq",
    "moment1": "exp_avg",
    "moment2": "exp_avg_sq",
    "moments": "momentum_buffer",
}
"""Torch's names for the state of MindSpore's optimizers; other state keeps its name."""

_AMSGRAD = "max_exp_avg_sq"
_INTERNAL = "stat"
"""State by which MindSpore's SGD recognizes its first step; without meaning beside the momentum."""

_SETTINGS = {"momentum": "momentum", "beta1": "betas[0]", "beta2": "betas[1]", "eps": "eps", "dampening": "dampening"}
"""Constant settings of MindSpore's optimizers, and torch's names for them."""


def follow(
    name: str,
    optimizer: nn.Cell,
    *,
    paths: Sequence[str],
    before: Sequence[Sight],
    after: Sequence[Sight],
    selects: Callable[[str], bool],
) -> Followed:
    """Find the tensors and settings of an optimizer that are recorded.

    Args:
        name: Name of the optimizer in the recording.
        optimizer: One of `mindspore.nn`, `mindspore.experimental.optim` or `mindspore.mint.optim`.
        paths: Canonical paths of its parameters, in its order.
        before: Further values to read before each step.
        after: Further values to read after each step.
        selects: Returns whether to observe the parameter with a path.
    """
    parameters = tuple(optimizer.parameters)
    by_name = dict(zip((parameter.name for parameter in parameters), paths, strict=True))
    held = [
        Sight(parameter=parameter, phase="param", paths=(path,), slot="value")
        for parameter, path in zip(parameters, paths, strict=True)
        if selects(path)
    ]
    state = _with_count(optimizer, [sight for sight in _state(optimizer, by_name) if selects(sight.paths[0])])
    groups, rates, schedule = _groups(optimizer, paths, name)
    return Followed(
        name=name, optimizer=optimizer, paths=tuple(paths), before=tuple(before), rates=rates, schedule=schedule,
        after=(*held, *after, *state), settings=dict(_settings(optimizer, groups)), groups=groups,
        factor=float(getattr(optimizer, "loss_scale", 1.0)),
    )  # fmt: skip


def _state(optimizer: nn.Cell, paths: Mapping[str, str]) -> Iterator[Sight]:
    """The state of single parameters: its name ends with the name of the parameter."""
    amsgrad = any(group.get("amsgrad") for group in getattr(optimizer, "param_groups", ()))
    unused = (_INTERNAL,) if amsgrad else (_INTERNAL, _AMSGRAD)
    for _, parameter in optimizer.parameters_and_names():
        kind, _, owner = parameter.name.partition(".")
        if parameter.name not in paths and owner in paths and kind not in unused:
            yield Sight(parameter=parameter, phase="optimizer", paths=(paths[owner],), slot=_SLOTS.get(kind, kind))


def _with_count(optimizer: nn.Cell, state: list[Sight]) -> list[Sight]:
    """The state with the count of steps, which torch's Adam keeps per parameter and MindSpore's once for all."""
    count = getattr(optimizer, "state_step", getattr(optimizer, "global_step", None))
    paths = tuple(sight.paths[0] for sight in state if sight.slot == _SLOTS["moment2"])
    if not paths or not isinstance(count, Parameter):
        return state
    return [*state, Sight(parameter=count, phase="optimizer", paths=paths, slot=COUNT)]


def _groups(
    optimizer: nn.Cell, paths: Sequence[str], name: str
) -> tuple[tuple[tuple[str, ...], ...], tuple[Sight, ...], Callable[[], Any] | None]:
    """The groups of parameters, the parameters that hold learning rates, and the function that computes one."""
    if hasattr(optimizer, "param_groups"):
        by_id = dict(zip(map(id, optimizer.parameters), paths, strict=True))
        groups = tuple(tuple(by_id[id(one)] for one in group["params"]) for group in optimizer.param_groups)
        held = [group["lr"] for group in optimizer.param_groups]
    elif getattr(optimizer, "is_group", False):  # each parameter has settings of its own
        groups = tuple((path,) for path in paths)
        rate = optimizer.learning_rate
        held = list(rate) if isinstance(rate, (list, tuple)) else [rate] * len(paths)
    else:
        groups, held = (tuple(paths),), [optimizer.learning_rate]
    rates = tuple(
        Sight(parameter=rate, phase="optimizer", paths=(f"{name}.groups[{number}]",), slot=RATE)
        for number, rate in enumerate(held)
        if isinstance(rate, Parameter)
    )
    scheduled = len(held) == 1 and not rates and hasattr(optimizer, "get_lr")
    return groups, rates, optimizer.get_lr if scheduled else None


def _settings(optimizer: nn.Cell, groups: Sequence[Sequence[str]]) -> Iterator[tuple[tuple[int, str], float]]:
    for number in range(len(groups)):
        if hasattr(optimizer, "param_groups"):
            named = {key: value for key, value in optimizer.param_groups[number].items() if key not in ("params", "lr")}
        else:
            named = {slot: getattr(optimizer, own) for own, slot in _SETTINGS.items() if hasattr(optimizer, own)}
            decay = optimizer.weight_decay
            named["weight_decay"] = decay[number] if isinstance(decay, (list, tuple)) else decay
        for slot, value in named.items():
            entries = enumerate(value) if isinstance(value, (list, tuple)) else ((None, value),)
            for index, entry in entries:
                if (constant := _constant(entry)) is not None:
                    yield (number, slot if index is None else f"{slot}[{index}]"), constant


def _constant(value: Any) -> float | None:
    """A setting as a number; None if it is computed in each step."""
    if hasattr(value, "asnumpy"):
        array = read(value)
        return float(np.asarray(array, dtype=np.float64).reshape(-1)[0]) if array.size == 1 else None
    return float(value) if isinstance(value, (bool, int, float)) else None
