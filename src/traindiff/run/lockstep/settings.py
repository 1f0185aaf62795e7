"""What the user asked of a lockstep, checked before anything is attached."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from traindiff.analyse.merge.renames import Renaming, parse_renames
from traindiff.analyse.noise.tolerance import TolerancesByPhase
from traindiff.errors import ConfigError, Problem
from traindiff.observe.torch.hooks.optimizer_step import IMPLEMENTATION_CHOICES
from traindiff.observe.torch.session.targets import Targets
from traindiff.observe.torch.sharding.deepspeed_optimizer import (
    EngineOptimizer,
    decouples_weight_decay,
    engine_settings,
)
from traindiff.run.lockstep.stepped import Stepped
from traindiff.storage import Recording, open_recording

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


Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

TRACKED = ("params", "loss", "grads", "activations")
"""What can be compared, in the order in which the settings are printed."""

TOLERANCES = {"params": "param_tol", "loss": "loss_tol", "grads": "grad_tol", "activations": "activation_tol"}
"""Name of each one's tolerance."""

_OBSERVE = {
    "params": ("param", "update", "optimizer"),
    "loss": ("loss",),
    "grads": ("grad", "grad.stages"),
    "activations": ("forward", "backward"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepSettings:
    """Checked settings of a lockstep; see `traindiff.Lockstep` for what they mean.

    Attributes:
        batches: How many; None for all that there are.
        test_every: Compare in every so manieth step.
        status_every: Print the losses of every so manieth batch.
        tracked: What is compared, of `TRACKED`.
        tolerances: The user's tolerances, by what they are of.
        resync: Whether the candidate is set back after a divergence.
        rename: Turns the candidate's paths into the baseline's.
        noise: Recordings of further correct runs of the baseline's training.
        select: What of the models is observed.
        output: Directory in which both recordings are kept; None to keep nothing.
        timeout_seconds: How long ranks wait for each other.
    """

    batches: int | None
    test_every: int
    status_every: int
    tracked: frozenset[str]
    tolerances: Mapping[str, float]
    resync: bool
    rename: Renaming
    noise: tuple[Recording, ...]
    select: str | Iterable[str]
    output: str | None
    timeout_seconds: float

    @property
    def observe(self) -> list[str]:
        """What is recorded of both sides."""
        found = ["batch"]
        for what in TRACKED:
            if what in self.tracked:
                # States of optimizers tell how far updates may be apart; a tolerance asks for parameters alone.
                own = ("param",) if what == "params" and what in self.tolerances else _OBSERVE[what]
                found += own
        return found

    @property
    def measures(self) -> bool:
        """Whether anything is judged by floors."""
        return bool(self.tracked - self.tolerances.keys())

    @property
    def by_phase(self) -> TolerancesByPhase:
        """The tolerances, by phase."""
        phases: dict[str, float] = {}
        for what, tolerance in self.tolerances.items():
            phases |= dict.fromkeys((one for one in _OBSERVE[what] if "." not in one), tolerance)
        if "params" in self.tolerances:  # what a step did is not judged beside what it led to
            phases |= {"update": float("inf"), "optimizer": float("inf")}
        return TolerancesByPhase(phases=phases)

    def lines(self, total: int | None, floors: str) -> list[str]:
        """The configuration as it is printed.

        Args:
            total: How many batches there are, if that is known.
            floors: What decides where no tolerance is given.
        """
        found = ["--- Model Stepper Configuration ---", f"batches={'all' if total is None else total}"]
        found += [f"test_every={self.test_every}", f"status_every={self.status_every}"]
        for what in TRACKED:
            found.append(f"track_{what}={what in self.tracked}")
            judged_by = format(self.tolerances[what], "e") if what in self.tolerances else floors
            found.append(f"{TOLERANCES[what]}={judged_by if what in self.tracked else None}")
        return [*found, f"resync={self.resync}"]


def lockstep_settings(
    *,
    batches: Any,
    test_every: Any,
    status_every: Any,
    tracked: Mapping[str, Any],
    tolerances: Mapping[str, Any],
    resync: Any,
    noise: Paths,
    rename: Mapping[str, str] | Sequence[str] | None,
    select: str | Iterable[str],
    output: str | os.PathLike[str] | None,
    timeout_seconds: Any,
    problems: list[Problem],
) -> LockstepSettings:
    """Check the settings; see `traindiff.Lockstep`.

    Raises:
        ConfigError: Lists everything that is wrong, with what was found before.
        RecordingError: A noise recording cannot be used.
    """
    given = {what: value for what, value in tolerances.items() if value is not None}
    problems += _wrong_counts(batches=batches, test_every=test_every, status_every=status_every)
    problems += _wrong_flags({**{f"track_{what}": one for what, one in tracked.items()}, "resync": resync})
    problems += _wrong_tolerances(given, tracked)
    problems += _wrong_timeout(timeout_seconds)
    if resync is True and test_every != 1:
        what = "would take what batches in between did, which are not observed, for another start of the candidate."
        fix = "Leave test_every out, or resync."
        problems.append(Problem(where=f"Lockstep(resync=True, test_every={test_every!r})", what=what, fix=fix))
    if not any(tracked.values()):
        fix = "Leave out at least one of track_params=False, track_loss=False, track_grads=False."
        problems.append(Problem(where="Lockstep(track_...=False)", what="leaves nothing to compare.", fix=fix))
    if problems:
        raise ConfigError("Lockstep(...)", problems, consequence="nothing was trained")
    paths = [noise] if isinstance(noise, (str, os.PathLike)) else noise
    return LockstepSettings(
        batches=batches,
        test_every=test_every,
        status_every=status_every,
        tracked=frozenset(what for what, wanted in tracked.items() if wanted),
        tolerances={what: float(value) for what, value in given.items()},
        resync=resync,
        rename=parse_renames(rename),
        noise=tuple(open_recording(os.fspath(path)) for path in paths),
        select=select,
        output=None if output is None else os.fspath(output),
        timeout_seconds=float(timeout_seconds),
    )


def _wrong_counts(**counts: Any) -> Iterator[Problem]:
    for name, value in counts.items():
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_count and not (name == "batches" and value is None):
            yield _problem(name, value, "must be a whole number, at least 1.", f"Write e.g. {name}=5.")


def _wrong_flags(flags: Mapping[str, Any]) -> Iterator[Problem]:
    for name, value in flags.items():
        if not isinstance(value, bool):
            yield _problem(name, value, "must be True or False.", f"Write {name}=True, or {name}=False.")


def _wrong_tolerances(given: Mapping[str, Any], tracked: Mapping[str, Any]) -> Iterator[Problem]:
    for what, value in given.items():
        name = TOLERANCES[what]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            fix = f"Write e.g. {name}=1e-5, or leave it out to judge by floors."
            yield _problem(name, value, "must be a number from 0 up.", fix)
        elif not tracked[what]:
            fix = f"Write track_{what}=True, or leave {name} out."
            yield _problem(name, value, f"has no effect: track_{what} is False.", fix)


def _wrong_timeout(value: Any) -> Iterator[Problem]:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        fix = "Write e.g. timeout_seconds=600."
        yield _problem("timeout_seconds", value, "must be a number of seconds above 0.", fix)


def _problem(name: str, value: Any, what: str, fix: str) -> Problem:
    return Problem(where=f"Lockstep({name}={value!r})", what=what, fix=fix)
