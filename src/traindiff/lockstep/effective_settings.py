"""What two sides are set to do: optimizers and their settings, clipping, scaling, accumulation, dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from traindiff.engines.deepspeed_engine import decouples_weight_decay, engine_settings
from traindiff.engines.deepspeed_optimizer import EngineOptimizer
from traindiff.lockstep.stepped import Stepped
from traindiff.sessions.targets import Targets
from traindiff.taps.optimizer_step import IMPLEMENTATION_CHOICES

Settings = dict[str, dict[str, Any]]
"""Value of each setting by parameter, or by the empty path where it is one of the whole training."""

UNKNOWN = "unknown"

_NO_SETTINGS = frozenset({*IMPLEMENTATION_CHOICES, "initial_lr", "lr_scale", "name", "param_names", "differentiable"})
"""Entries of a parameter group that say how, or for whom, and not what is computed."""

_OF_ENGINE = ("gradient_clipping", "gradient_accumulation_steps", "loss_scale")
_MADE_HERE = {"gradient_clipping": 0.0, "gradient_accumulation_steps": 1, "loss_scale": 1.0}


def effective_settings(side: Stepped, targets: Targets) -> Settings:
    """What a side is set to do now. Nothing is read from a device but numbers that a schedule keeps there.

    Args:
        side: The side.
        targets: What is observed of it.
    """
    found: Settings = {}
    engine = engine_settings(side.model)
    whole = engine or (_MADE_HERE if side.loss is not None else {})
    for name in _OF_ENGINE:
        found[name] = {"": whole.get(name, UNKNOWN)}
    found["dtype"] = {path: str(one.dtype).removeprefix("torch.") for path, one in targets.parameters.items()}
    for optimizer in targets.optimizers.values():
        opened = isinstance(optimizer, EngineOptimizer)
        inner: Optimizer = optimizer.inner[0] if isinstance(optimizer, EngineOptimizer) else optimizer
        paths = _paths_of_groups(optimizer, targets)
        for number, group in enumerate(inner.param_groups):
            settings = {name: _plain(value) for name, value in group.items() if name not in _NO_SETTINGS}
            if opened and (decoupled := decouples_weight_decay(inner)) is not None:
                settings["decoupled_weight_decay"] = decoupled
            settings["optimizer"] = _kind(inner)
            for path in paths[number] if number < len(paths) else ():
                for name, value in settings.items():
                    found.setdefault(name, {})[path] = value
    return found


class SettingDifferences:
    """Tells each difference between the settings of two sides once, when it is first seen."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str, str]] = set()

    def lines(self, baseline: Settings, candidate: Settings) -> Iterator[str]:
        """One line for each difference that has not been told."""
        for name in [*baseline, *(name for name in candidate if name not in baseline)]:
            changes: dict[tuple[str, str], int] = {}
            for path, before, after in _both(baseline.get(name, {}), candidate.get(name, {})):
                if not _same(before, after):
                    change = _shown(name, before), _shown(name, after)
                    changes[change] = changes.get(change, 0) + 1
                    whole = not path
            for (before, after), count in changes.items():
                if (name, before, after) not in self._told:
                    self._told.add((name, before, after))
                    of = "" if whole else f" parameters={count}"
                    yield f"SETTING DIFFERS name={name} baseline={before} candidate={after}{of}"


def _both(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for path, value in baseline.items():
        if path in candidate:
            yield path, value, candidate[path]


def _same(baseline: Any, candidate: Any) -> bool:
    if UNKNOWN in (baseline, candidate) or baseline == candidate:
        return True
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (baseline, candidate))
    return numbers and math.isclose(baseline, candidate, rel_tol=1e-9)


def _shown(name: str, value: Any) -> str:
    if name == "gradient_clipping" and value == 0.0:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "")


def _kind(optimizer: Optimizer) -> str:
    """Class of an optimizer; AdamW is an Adam that decouples weight decay, which is a setting of its own."""
    name = type(optimizer).__name__
    return {"AdamW": "Adam", "FusedAdam": "Adam", "DeepSpeedCPUAdam": "Adam"}.get(name, name)


def _paths_of_groups(optimizer: Optimizer | EngineOptimizer, targets: Targets) -> list[list[str]]:
    if isinstance(optimizer, EngineOptimizer):
        return [list(group) for group in optimizer.groups]
    return [
        [piece.path for parameter in group["params"] for piece in targets.pieces_of(parameter) or ()]
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.tolist())
    return tuple(value) if isinstance(value, list) else value
