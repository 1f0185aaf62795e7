"""What of an optimizer, and of the parameters that it holds, is read before and after each of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Parameter, nn

from traindiff.observe.mindspore.observations import read

_SLOTS = {
    "accum": "momentum_buffer",
    "adam_m": "exp_avg",
    "adam_v": "exp_avg_sq",
    "moment1": "exp_avg",
    "moment2": "exp_avg_sq",
    "moments": "momentum_buffer",
}
"""What torch calls the state that MindSpore's optimizers name so; other state keeps its name."""

_AMSGRAD = "max_exp_avg_sq"
_INTERNAL = "stat"
"""What MindSpore's SGD tells its first step by; it has no meaning beside the momentum."""

RATE = "lr"
"""Slot of learning rates."""

COUNT = "step"
"""Slot of the number of steps that an optimizer has taken; torch keeps it in float32."""

_SETTINGS = {"momentum": "momentum", "beta1": "betas[0]", "beta2": "betas[1]", "eps": "eps", "dampening": "dampening"}
"""Settings of MindSpore's optimizers that stay as they are, and what torch calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One of MindSpore's parameters, as it is read at one moment of a step.

    Attributes:
        parameter: It.
        phase: Phase that it is filed under.
        paths: Canonical paths that it is filed under: one, unless it counts the steps of all parameters.
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
        name: What its steps are filed under.
        optimizer: It.
        paths: Canonical paths of its parameters, in the order in which it is given their gradients.
        before: Parameters and buffers as a step finds them; only before a step whose predecessor was not recorded.
        rates: Learning rates, before each step.
        schedule: Gives the learning rate of a step, where that is computed and not held by a parameter.
        after: Parameters, buffers and state as a step leaves them.
        settings: By group and slot: settings that stay as they are.
        groups: Canonical paths of the parameters of each group.
        factor: What gradients are multiplied by when it is given them: its loss scale.
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


def follow(
    name: str,
    optimizer: nn.Cell,
    *,
    paths: Sequence[str],
    before: Sequence[Sight],
    after: Sequence[Sight],
    selects: Callable[[str], bool],
) -> Followed:
    """Find out what there is to see of an optimizer.

    Args:
        name: What its steps are filed under.
        optimizer: One of `mindspore.nn`, `mindspore.experimental.optim` or `mindspore.mint.optim`.
        paths: Canonical paths of its parameters, in its order.
        before: What else is read as its steps find it.
        after: What else is read as its steps leave it.
        selects: Whether what has this path is observed.
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
    """State that belongs to one parameter: it has that parameter's name behind its own."""
    amsgrad = any(group.get("amsgrad") for group in getattr(optimizer, "param_groups", ()))
    unused = (_INTERNAL,) if amsgrad else (_INTERNAL, _AMSGRAD)
    for _, parameter in optimizer.parameters_and_names():
        kind, _, owner = parameter.name.partition(".")
        if parameter.name not in paths and owner in paths and kind not in unused:
            yield Sight(parameter=parameter, phase="optimizer", paths=(paths[owner],), slot=_SLOTS.get(kind, kind))


def _with_count(optimizer: nn.Cell, state: list[Sight]) -> list[Sight]:
    """The state, with the count of steps that torch's Adam has for each parameter, and MindSpore's for all together."""
    count = getattr(optimizer, "state_step", getattr(optimizer, "global_step", None))
    paths = tuple(sight.paths[0] for sight in state if sight.slot == _SLOTS["moment2"])
    if not paths or not isinstance(count, Parameter):
        return state
    return [*state, Sight(parameter=count, phase="optimizer", paths=paths, slot=COUNT)]


def _groups(
    optimizer: nn.Cell, paths: Sequence[str], name: str
) -> tuple[tuple[tuple[str, ...], ...], tuple[Sight, ...], Callable[[], Any] | None]:
    """Groups of parameters that have their settings in common, and where the learning rates are."""
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
    """A setting as a number; None for one that is computed anew in each step."""
    if hasattr(value, "asnumpy"):
        array = read(value)
        return float(np.asarray(array, dtype=np.float64).reshape(-1)[0]) if array.size == 1 else None
    return float(value) if isinstance(value, (bool, int, float)) else None
