"""The calibration of noise floors: what the replicas of a baseline show over all steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from traindiff.analyse.noise.measured import ALONE, SAFETY
from traindiff.core.site import PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRecording:
    """One further correct run of the baseline's training.

    Attributes:
        path: Of the recording.
        replica: How it was made, e.g. `ulp:1`; empty for a run that was simply repeated.
        differs: Whether it differs from the baseline at all; identical bits show nothing about noise.
        partial: Why it is not a full replica; empty if it is.
    """

    path: str
    replica: str
    differs: bool
    partial: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The noise that the replicas show in general.

    Attributes:
        recordings: The noise recordings, in the order in which they were given.
        constants: By phase: the multiple of the others' differences that a replica may have, from holding out each in
            turn.
        own: Largest relative difference of a repeated run from the baseline, with its place; None without a repeated
            run.
        covered: Optimizer and number of the steps that at least one replica has.
    """

    recordings: tuple[NoiseRecording, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)
    own: tuple[float, str] | None = None
    covered: frozenset[tuple[str, int]] = frozenset()

    @property
    def replicas(self) -> tuple[NoiseRecording, ...]:
        """Recordings that differ from the baseline: floors are measured from them."""
        return tuple(one for one in self.recordings if one.differs)

    @property
    def is_partial(self) -> bool:
        """Whether a noise recording is not a full replica, so that floors may be too low."""
        return any(one.partial for one in self.recordings)

    def constant(self, phase: str) -> float:
        """Constant of a phase."""
        return self.constants.get(phase, 1.0) if len(self.replicas) > 1 else ALONE

    def to_json(self) -> dict[str, Any] | None:
        """The basis of the floors, in the schema of `--json`; None without noise recordings."""
        if not self.recordings:
            return None
        constants = {phase: self.constants[phase] for phase in PHASES if phase in self.constants}
        return {
            "recordings": [{"path": one.path, "replica": one.replica or None} for one in self.replicas],
            "identical": [one.path for one in self.recordings if not one.differs],
            "constants": constants if len(self.replicas) > 1 else None,
            "safety": SAFETY,
            "own": self._own_to_json(),
        }

    def _own_to_json(self) -> dict[str, Any] | None:
        if self.own is None:
            return None
        size, where = self.own
        return {"difference": size if math.isfinite(size) else None, "where": where if size else ""}

    def notes(self, *, uncovered: Sequence[int]) -> list[str]:
        """The basis of the verdict, one sentence each; reports begin with the baseline's own noise instead.

        Args:
            uncovered: Steps that were compared and that no replica has.
        """
        notes = []
        replicas = self.replicas
        if replicas:
            made = ", ".join(one.replica or f"a repeated run ({one.path})" for one in replicas)
            runs = "1 replica" if len(replicas) == 1 else f"{len(replicas)} replicas"
            notes.append(f"Floors are measured from {runs}: {made}.")
        elif self.recordings:
            notes.append("No noise recording differs from the baseline, so floors follow from rounding.")
        if len(replicas) == 1:
            notes.append(
                f"One replica cannot be held against others, so floors are {SAFETY * ALONE:g} x what it shows, "
                "an assumed factor; two or more measure it."
            )
        elif replicas and not any(one.replica for one in replicas):
            notes.append(
                "All of them are repeated runs: they show what varies on this machine, not what another "
                'implementation may differ by. record(replica="ulp:1") does.'
            )
        notes += [
            f"{one.path}: {one.partial}. Floors that are measured with it may be too low."
            for one in self.recordings
            if one.partial
        ]
        if uncovered:
            steps = f"step {uncovered[0]}" if len(uncovered) == 1 else f"{len(uncovered)} steps from {uncovered[0]} on"
            notes.append(f"No replica has {steps}; floors there follow from rounding.")
        return notes
