"""The settings of a lockstep, checked before anything is attached."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traindiff.analyse.merge.renames import Renaming, parse_renames
from traindiff.analyse.noise.tolerance import TolerancesByPhase
from traindiff.core.maps.accepted import AcceptedDifferences, accepted_of
from traindiff.core.maps.entries import Entry
from traindiff.core.maps.shipped import map_of
from traindiff.errors import ConfigError, Problem
from traindiff.storage import Recording, open_recording

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

TRACKED = ("params", "loss", "grads", "activations")
"""Things that can be compared, in the order in which the settings are printed."""

TOLERANCES = {"params": "param_tol", "loss": "loss_tol", "grads": "grad_tol", "activations": "activation_tol"}
"""Names of their tolerances."""

_ON_REQUEST = ("activations",)
"""Things that are not compared by default. A tolerance for one of them without its `track_...=True` is a mistake."""

_OBSERVE = {
    "params": ("param", "update", "optimizer"),
    "loss": ("loss",),
    "grads": ("grad", "grad.stages"),
    "activations": ("forward", "backward"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LockstepSettings:
    """Checked settings of a lockstep; see `traindiff.Lockstep` for their meaning.

    `tracked` has the names of `TRACKED` that are compared; `tolerances` has the user's tolerances by these names.
    """

    num_batches: int | None
    test_every: int
    status_every: int
    tracked: frozenset[str]
    tolerances: Mapping[str, float]
    resync: bool
    rename: Renaming
    entries: Sequence[Entry]
    accepted: AcceptedDifferences
    noise: tuple[Recording, ...]
    select: str | Iterable[str]
    output: str | None
    timeout_seconds: float

    @property
    def observe(self) -> list[str]:
        """The phases to record on both sides."""
        found = ["batch"]
        for what in TRACKED:
            if what in self.tracked:
                # Optimizer state bounds the difference of updates; with a tolerance only parameters count.
                own = ("param",) if what == "params" and what in self.tolerances else _OBSERVE[what]
                found += own
        return found

    @property
    def measures(self) -> bool:
        """True if anything is judged by noise floors."""
        return bool(self.tracked - self.tolerances.keys())

    @property
    def by_phase(self) -> TolerancesByPhase:
        """The tolerances, by phase."""
        phases: dict[str, float] = {}
        for what, tolerance in self.tolerances.items():
            phases |= dict.fromkeys((one for one in _OBSERVE[what] if "." not in one), tolerance)
        if "params" in self.tolerances:  # updates are not judged in addition to their result
            phases |= {"update": float("inf"), "optimizer": float("inf")}
        return TolerancesByPhase(phases=phases)

    def lines(self, total: int | None, floors: str) -> list[str]:
        """The configuration as it is printed; ModelStepper's lines, and a setting that it lacks only if it is used.

        Args:
            total: Number of batches, if known.
            floors: The source of the tolerances that the user left out.
        """
        found = ["--- Model Stepper Configuration ---", f"batches={'all' if total is None else total}"]
        found += [f"test_every={self.test_every}", f"status_every={self.status_every}"]
        for what in TRACKED:
            if what in _ON_REQUEST and what not in self.tracked:
                continue
            found.append(f"track_{what}={what in self.tracked}")
            judged_by = floors if what in self.tracked else None
            found.append(
                f"{TOLERANCES[what]}={format(self.tolerances[what], 'e') if what in self.tolerances else judged_by}"
            )
        return [*found, "resync=True"] if self.resync else found


def lockstep_settings(
    *,
    num_batches: Any,
    test_every: Any,
    status_every: Any,
    tracked: Mapping[str, Any],
    tolerances: Mapping[str, Any],
    resync: Any,
    noise: Paths,
    rename: Mapping[str, str] | Sequence[str] | None,
    map: str | os.PathLike[str] | None,  # noqa: A002  as in the commands
    accept: str | os.PathLike[str] | None,
    select: str | Iterable[str],
    output: str | os.PathLike[str] | None,
    timeout_seconds: Any,
    problems: list[Problem],
) -> LockstepSettings:
    """The checked settings; see `traindiff.Lockstep`.

    Raises:
        ConfigError: Lists everything that is wrong, including the `problems` found before.
        RecordingError: A noise recording cannot be used.
    """
    given = {what: value for what, value in tolerances.items() if value is not None}
    problems += _wrong_counts(num_batches=num_batches, test_every=test_every, status_every=status_every)
    problems += _wrong_flags({**{f"track_{what}": one for what, one in tracked.items()}, "resync": resync})
    problems += _wrong_tolerances(given, tracked)
    problems += _wrong_timeout(timeout_seconds)
    if resync is True and test_every != 1:
        what = "would take what batches in between did, which are not observed, for another start of the candidate."
        fix = "Leave test_every out, or resync."
        problems.append(Problem(where=f"Lockstep(resync=True, test_every={test_every!r})", what=what, fix=fix))
    if resync is True and map is not None:
        what = (
            "would copy the baseline's tensors into the candidate, and a map may say that these are laid out otherwise."
        )
        problems.append(Problem(where="Lockstep(resync=True, map=...)", what=what, fix="Leave out one of the two."))
    if not any(tracked.values()):
        fix = "Leave out at least one of track_params=False, track_loss=False, track_grads=False."
        problems.append(Problem(where="Lockstep(track_...=False)", what="leaves nothing to compare.", fix=fix))
    if problems:
        raise ConfigError("Lockstep(...)", problems, consequence="nothing was trained")
    paths = [noise] if isinstance(noise, (str, os.PathLike)) else noise
    return LockstepSettings(
        num_batches=num_batches, test_every=test_every, status_every=status_every,
        tracked=frozenset(what for what, wanted in tracked.items() if wanted),
        tolerances={what: float(value) for what, value in given.items()}, resync=resync, rename=parse_renames(rename),
        entries=map_of(map), accepted=accepted_of(accept),
        noise=tuple(open_recording(os.fspath(path)) for path in paths), select=select,
        output=None if output is None else os.fspath(output), timeout_seconds=float(timeout_seconds),
    )  # fmt: skip


def _wrong_counts(**counts: Any) -> Iterator[Problem]:
    for name, value in counts.items():
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_count and not (name == "num_batches" and value is None):
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
        elif what in _ON_REQUEST and not tracked[what]:
            fix = f"Write track_{what}=True, or leave {name} out."
            yield _problem(name, value, f"has no effect: track_{what} is False.", fix)


def _wrong_timeout(value: Any) -> Iterator[Problem]:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        fix = "Write e.g. timeout_seconds=600."
        yield _problem("timeout_seconds", value, "must be a number of seconds above 0.", fix)


def _problem(name: str, value: Any, what: str, fix: str) -> Problem:
    return Problem(where=f"Lockstep({name}={value!r})", what=what, fix=fix)
