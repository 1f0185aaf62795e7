"""The baseline's replicas: their differences from it in a step, and what they show over all steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from traindiff.analyse.align.pairs import align
from traindiff.analyse.align.side import NO_NAMES, Side, SideStep, gradient_norms, join, sites_in_order
from traindiff.analyse.align.site_map import SideNames
from traindiff.analyse.findings import finite
from traindiff.analyse.merge.distance import Pair, size_of
from traindiff.analyse.merge.run_steps import RunStep
from traindiff.analyse.merge.site import Part, SiteKey
from traindiff.analyse.noise.moments import moments_apart
from traindiff.core.site import PHASES
from traindiff.core.summary import UNIT_ROUNDOFF, finite_count
from traindiff.storage import Run

SAFETY = 2.0
"""Multiple of the replicas' differences that a correct run may have.

With m replicas, one of m + 1 further correct runs lies beyond all of them, but not far: none of the legal variations in
benchmarks/FAULTS.md exceeds the floor that this factor leaves.
"""

ALONE = 4.0
"""Constant of the floors if there is only one replica, so that none can be held out."""

FEW = 16
"""Tensors with fewer elements are too small to measure their noise with a few replicas."""


def basis(
    pair: Pair,
    distances: Sequence[float],
    storage: float = 0.0,
    terms: float = 1.0,
    rounded: float = 0.0,
    inside: float = 0.0,
) -> float:
    """The quantity that the floor of a site is a multiple of: rounding, or the replicas' differences if larger.

    An estimate from few replicas scatters, the more the fewer elements there are: the relative spread of a norm of n
    independent errors is 1 / sqrt(2 n).

    Args:
        pair: Both sides.
        distances: Relative differences of replicas from the baseline.
        storage: For an update: norm of the parameter over norm of the update.
        terms: Rows that are summed for each element of a gradient, or of an output of BatchNorm. A kernel that sums one
            after the other in float32 is off by sqrt(terms) u. Replicas do not show that, because all run the
            baseline's kernels. Measured with torch on the CPU: 30 u over 512 rows (gradients of BatchNorm, channels
            last; 4 u otherwise).
        rounded: Largest unit roundoff on the baseline's way to here: its noise is of this size already, whatever the
            dtype of the pair (float32 parameters under autocast).
        inside: Unit roundoff of the dtype that the operation may compute in, and that these replicas do not show.
            Gradients with one axis (of norms) may be summed in it, too: torch's LayerNorm is off by 0.25 sqrt(terms) u.
    """
    baseline, candidate = pair.baseline, pair.candidate
    units = [UNIT_ROUNDOFF.get(entry.dtype, 0.0) for entry in (baseline, candidate)]
    # A shorter dtype has more noise.
    shorter = max(1.0, max(units) / max(units[0], rounded)) if units[0] and max(units) else 1.0
    summation = math.sqrt(terms) * min(max(units), UNIT_ROUNDOFF["float32"])
    if len(baseline.shape) == 1:
        inside *= max(1.0, 0.25 * math.sqrt(terms))
    quantum = max(max(units) * (1.0 + storage), summation, inside)
    spread = 1.0 + 4.0 / math.sqrt(max(1, int(finite_count(baseline.summary))))
    return spread * max(quantum, shorter * max(distances, default=0.0))


UNMEASURED = ("batch", "rng")
"""Phases and paths that are compared bit by bit, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNoise:
    """How far replicas are from the baseline in one step, by site.

    Attributes:
        sizes: Relative L2 difference of each replica that has the site. inf: whole numbers that differ.
        moments: How far the norm or the sum of any of them is from the baseline's; see `moments_apart`.
        inputs: Largest relative L2 difference of any of them at an input of the model, which a training may compute.
    """

    sizes: Mapping[SiteKey, tuple[float, ...]] = field(default_factory=dict)
    moments: Mapping[SiteKey, float] = field(default_factory=dict)
    inputs: float = 0.0


def made_as(recording: Run) -> str:
    """How a noise recording was made, e.g. `ulp:1`; empty for a run that was simply repeated."""
    return str(recording.run["settings"].get("replica") or "")


class FollowingSteps(Protocol):
    """The steps of a run that follows another one."""

    def until(self, optimizer: str, step: int) -> Iterable[RunStep]:
        """The steps up to and with this one that were not given yet, in ascending order per optimizer."""


NoiseRun = tuple[Run, FollowingSteps]
"""A further correct run of the baseline's training, and its steps."""


class Replicas:
    """The noise recordings, as they follow the baseline through its steps.

    Args:
        runs: The recordings, with their steps.
        names: Of the baseline's sites, if a map joins some of them.

    Attributes:
        sides: The recordings.
        operators: Observations of operators in the latest step, one list per recording.
        earlier: Of the latest step: differences in the evaluations of the loss before the last one.
    """

    def __init__(self, runs: Sequence[NoiseRun], names: SideNames = NO_NAMES) -> None:
        self.earlier: list[StepNoise] = []
        self.sides = [Side(run, names=names) for run, _ in runs]
        self.operators: list[list[Part]] = []
        self._streams = [steps for _, steps in runs]

    def pairs(self, baseline: RunStep, step: SideStep) -> Iterator[tuple[SideStep | None, list[Pair]]]:
        """For each noise recording: its own step (None if it has none), and the pairs with the baseline."""
        self.operators = []
        others: list[tuple[SideStep, ...]] = []
        for side, stream in zip(self.sides, self._streams, strict=True):
            found: SideStep | None = None
            for one in stream.until(baseline.optimizer, baseline.step):
                derived = side.step(one)
                found = derived if one.step == baseline.step and one.finished else None
                if found:
                    self.operators.append(one.operators)
                    others.append((*found.earlier, found))
            if found and len(found.earlier) != len(step.earlier):
                found = None  # its last evaluation is not the baseline's
            yield found, _pairs(step, found) if found else []
        self.earlier = [
            step_noise(_pairs(one, other[number]) for other in others if number < len(other))
            for number, one in enumerate(step.earlier)
        ]

    def noise(self, baseline: RunStep, step: SideStep) -> StepNoise:
        """Differences from the baseline in one step."""
        return step_noise(pairs for _, pairs in self.pairs(baseline, step))


def step_noise(of_runs: Iterable[Sequence[Pair]]) -> StepNoise:
    """Differences from the baseline in one step, from the pairs of each noise recording with it."""
    sizes: dict[SiteKey, tuple[float, ...]] = {}
    moments: dict[SiteKey, float] = {}
    inputs = 0.0
    for pairs in of_runs:
        for pair in pairs:
            key = pair.baseline.key
            if key.phase == "batch" and key.path != "rng":
                inputs = max(inputs, size_of(pair))
            if is_measured(key):
                sizes[key] = (*sizes.get(key, ()), size_of(pair))
                moments[key] = max(moments.get(key, 0.0), *moments_apart(pair).values())
    return StepNoise(sizes=sizes, moments=moments, inputs=inputs)


def _pairs(baseline: SideStep, replica: SideStep) -> list[Pair]:
    tables = join((baseline, replica))
    aligned = align(*map(sites_in_order, tables))
    pairs = [pair for pair in aligned.pairs if not (pair.baseline.unobserved or pair.candidate.unobserved)]
    return [*pairs, *gradient_norms(pairs)]


def is_measured(key: SiteKey) -> bool:
    """True if a site has noise. Sites that must be equal to the bit have none."""
    return key.phase not in UNMEASURED and key.path not in UNMEASURED


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRecording:
    """One further correct run of the baseline's training.

    Attributes:
        path: Of the recording.
        replica: How it was made, e.g. `ulp:1`; empty for a run that was simply repeated.
        differs: Whether it differs from the baseline at all; identical bits show that the training repeats itself.
        whole: Whether it has every site that the baseline has.
        partial: Why it is not a full replica; empty if it is.
    """

    path: str
    replica: str
    differs: bool
    whole: bool = True
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
    def repeated(self) -> int:
        """Number of repeated runs with the baseline's bits; 0 if any recording differs, so that there is noise."""
        if self.replicas:
            return 0
        return sum(not one.replica and one.whole and not one.partial for one in self.recordings)

    @property
    def is_known(self) -> bool:
        """True if the noise was measured, be it 0."""
        return bool(self.replicas or self.repeated)

    @property
    def every_bit(self) -> str:
        """Why any bit that differs is a finding: the measured noise is 0. Empty if it is not."""
        count = self.repeated
        if not count:
            return ""
        runs = "1 repeated run" if count == 1 else f"{count} repeated runs"
        return f"{runs} had the same bits, so every difference counts."

    @property
    def is_partial(self) -> bool:
        """True if a noise recording is not a full replica, so that floors may be too low."""
        return any(one.partial for one in self.recordings)

    def constant(self, phase: str) -> float:
        """Constant of a phase."""
        return self.constants.get(phase, 1.0) if len(self.replicas) > 1 else ALONE

    def to_json(self) -> dict[str, Any] | None:
        """The basis of the floors, in the schema of `--json`; None without noise recordings."""
        if not self.recordings:
            return None
        own: dict[str, Any] | None = None
        if self.own is not None:
            size, where = self.own
            own = {"difference": finite(size), "where": where if size else ""}
        constants = {phase: self.constants[phase] for phase in PHASES if phase in self.constants}
        return {
            "recordings": [{"path": one.path, "replica": one.replica or None} for one in self.replicas],
            "identical": [one.path for one in self.recordings if not one.differs],
            "constants": constants if len(self.replicas) > 1 else None,
            "safety": SAFETY,
            "own": own,
        }

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
        elif self.repeated:
            notes.append(self.every_bit)
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
            notes.append(
                f"No {'replica' if replicas else 'repeated run'} has {steps}; floors there follow from rounding."
            )
        return notes
