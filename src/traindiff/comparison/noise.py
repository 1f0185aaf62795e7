"""Measured noise: how far the baseline's replicas are from it, site by site.

A replica is another correct run of the same training: perturbed within rounding on purpose
(`record(replica=...)`), or simply run again. What it differs by at a site is what correct runs
differ by there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from traindiff.comparison.alignment import Pair, align
from traindiff.comparison.derived import adaptive_parameters, gradient_norms, is_quotient
from traindiff.comparison.exact import check_batch, check_hyper_parameters, check_initial_parameter, check_random_state
from traindiff.comparison.floors import UNIT_ROUNDOFF
from traindiff.comparison.gradients import summed_rows, terms_by_module
from traindiff.comparison.measure import difference
from traindiff.comparison.pairing import RunStep, StepsOnDemand, run_steps
from traindiff.comparison.recomputation import without_recomputed
from traindiff.comparison.side import Side, SideStep, in_order, join
from traindiff.comparison.step_table import Entry, Key
from traindiff.comparison.verdict import Finding
from traindiff.errors import ConfigError, Problem
from traindiff.observation import ITSELF, NO_REPLICA
from traindiff.recording import Recording
from traindiff.site import PHASES
from traindiff.steps import StepSelection
from traindiff.summary import finite_count, norm

SAFETY = 2.0
"""How much further than its replicas a correct run may be.

With m replicas, a further correct run lies beyond all of them in one of m + 1 cases, but not far: of the legal
variations in benchmarks/FAULTS.md none exceeds the floor that this factor leaves.
"""

ALONE = 4.0
"""Constant of the floors where there is one replica only, so that none can be held out."""

FEW = 16
"""Tensors with fewer elements are too small for their noise to be measured by a few replicas."""

UNMEASURED = ("batch", "rng")
"""Phases and paths that are compared bit by bit, or not at all."""

StepNoise = Mapping[Key, tuple[float, ...]]
"""By site: relative L2 difference of each replica that has it from the baseline. inf: whole numbers that differ."""


OwnedParameters = dict[str, list[dict[int, float]]]
"""By module: of each of its parameters, the distance of each replica from the baseline after the step before."""


@dataclass(slots=True, kw_only=True)
class Calibration:
    """What the replicas say about noise in general, before anything is judged by it.

    Attributes:
        names: Paths of the noise recordings that differ from the baseline.
        replicas: How each was made, e.g. `ulp:1`; empty for a run that was simply repeated.
        repeated: Paths of those that hold the baseline's very bits, which say nothing about noise.
        constants: By phase: how far a replica may be, as a multiple of what the others show there; the
            largest that was needed when each was held out in turn.
        own: Largest relative difference of a repeated run from the baseline, with its place; None
            where no run was simply repeated.
        covered: Optimizer and number of the steps that at least one replica has.
        partial: By path of a noise recording: why it is no full replica.
    """

    names: list[str] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    constants: dict[str, float] = field(default_factory=dict)
    own: tuple[float, str] | None = None
    covered: set[tuple[str, int]] = field(default_factory=set)
    partial: dict[str, str] = field(default_factory=dict)

    def note_partial(self, path: str, step: SideStep) -> None:
        """Note if a noise recording says that its training was not perturbed as it should have been."""
        said = (entry.unobserved for key, entry in step.table.items() if key.path == ITSELF)
        for reason in said:
            if reason.startswith(NO_REPLICA):
                self.partial.setdefault(path, reason)

    def constant(self, phase: str) -> float:
        """Constant of a phase."""
        return self.constants.get(phase, 1.0) if len(self.names) > 1 else ALONE

    def to_json(self) -> dict[str, Any] | None:
        """What floors rest on, in the schema of `--json`; None without noise recordings."""
        if not (self.names or self.repeated):
            return None
        own, where = self.own or (math.nan, "")
        constants = {phase: self.constants[phase] for phase in PHASES if phase in self.constants}
        return {
            "recordings": [
                {"path": path, "replica": replica or None}
                for path, replica in zip(self.names, self.replicas, strict=True)
            ],
            "identical": list(self.repeated),
            "constants": constants if len(self.names) > 1 else None,
            "safety": SAFETY,
            "own": None
            if self.own is None
            else {"difference": own if math.isfinite(own) else None, "where": where if own else ""},
        }

    def notes(self, *, uncovered: Sequence[int]) -> list[str]:
        """What the verdict rests on, one sentence each; reports begin with the baseline's own noise instead."""
        notes = []
        if self.names:
            made = ", ".join(replica or f"a repeated run ({path})" for path, replica in self._made())
            runs = "1 replica" if len(self.names) == 1 else f"{len(self.names)} replicas"
            notes.append(f"Floors are measured from {runs}: {made}.")
        elif self.repeated:
            notes.append("No noise recording differs from the baseline, so floors follow from rounding.")
        if len(self.names) == 1:
            notes.append(
                f"One replica cannot be held against others, so floors are {SAFETY * ALONE:g} x what it shows, "
                "an assumed factor; two or more measure it."
            )
        elif self.names and not any(self.replicas):
            notes.append(
                "All of them are repeated runs: they show what varies on this machine, not what another "
                'implementation may differ by. record(replica="ulp:1") does.'
            )
        notes += [
            f"{path}: {reason}. Floors that are measured with it may be too low."
            for path, reason in self.partial.items()
        ]
        if uncovered:
            steps = f"step {uncovered[0]}" if len(uncovered) == 1 else f"{len(uncovered)} steps from {uncovered[0]} on"
            notes.append(f"No replica has {steps}; floors there follow from rounding.")
        return notes

    def _made(self) -> Iterator[tuple[str, str]]:
        return zip(self.names, self.replicas, strict=True)


class Replicas:
    """The noise recordings, as they follow the baseline through its steps."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.sides = [Side(recording) for recording in recordings]
        self._streams = [StepsOnDemand(run_steps(recording)) for recording in recordings]

    def pairs(self, baseline: RunStep, step: SideStep) -> Iterator[tuple[SideStep | None, list[Pair]]]:
        """Per noise recording: its own step and that brought together with the baseline's; None if it has none."""
        for side, stream in zip(self.sides, self._streams, strict=True):
            found: SideStep | None = None
            for one in stream.until(baseline.optimizer, baseline.step):
                derived = side.step(one)
                found = derived if one.step == baseline.step and one.finished else None
            yield found, _pairs(step, found) if found else []

    def noise(self, baseline: RunStep, step: SideStep) -> StepNoise:
        """Distances from the baseline in one step."""
        noise: dict[Key, tuple[float, ...]] = {}
        for _, pairs in self.pairs(baseline, step):
            for pair in pairs:
                key = pair.baseline.key
                if key.phase not in UNMEASURED and key.path not in UNMEASURED:
                    noise[key] = (*noise.get(key, ()), _apart(pair))
        return noise


def calibrate(baseline: Recording, recordings: Sequence[Recording], selection: StepSelection) -> Calibration:
    """Measure how the noise of a baseline varies from replica to replica.

    Each replica is held out in turn and held against the others. The largest ratio in a phase, over
    all sites and steps, is the constant by which floors of this phase are multiplied.

    Args:
        baseline: The run.
        recordings: Further correct runs of the same training.
        selection: Steps to look at.

    Raises:
        ConfigError: A recording is of another training.
    """
    replicas = Replicas(recordings)
    side = Side(baseline)
    result = Calibration()
    differs = [False] * len(recordings)
    aligned = [0] * len(recordings)
    parameters: OwnedParameters = {}
    for number, run_step in enumerate(run_steps(baseline)):
        step = side.step(run_step)
        if run_step.step not in selection:
            continue
        distances: dict[Key, list[tuple[int, float, Pair]]] = {}
        for index, (own, pairs) in enumerate(replicas.pairs(run_step, step)):
            if own is None:
                continue
            _refuse_another_training(replicas.sides[index], (side, step, own, pairs), run_step.step, first=number == 0)
            result.covered.add((run_step.optimizer, run_step.step))
            result.note_partial(recordings[index].path, own)
            aligned[index] += len(pairs)
            for pair in pairs:
                key = pair.baseline.key
                if key.phase in UNMEASURED or key.path in UNMEASURED:
                    continue
                apart = _apart(pair)
                differs[index] |= apart > 0
                distances.setdefault(key, []).append((index, apart, pair))
                if not _replica(recordings[index]) and apart > (result.own or (-1.0, ""))[0]:
                    result.own = (apart, f"step {run_step.step}, {key.phase} of {key.path} {key.slot}")
        _hold_out(distances, step.before, parameters, result.constants)
        parameters = _owned_parameters(distances)
    _refuse_what_does_not_align(recordings, aligned)
    for recording, different in zip(recordings, differs, strict=True):
        (result.names if different else result.repeated).append(recording.path)
        if different:
            result.replicas.append(_replica(recording))
    return result


def basis(
    pair: Pair,
    distances: Sequence[float],
    storage: float = 0.0,
    terms: float = 1.0,
    rounded: float = 0.0,
    inside: float = 0.0,
) -> float:
    """What the floor of a site is a multiple of: rounding, or what replicas show, whichever is larger.

    The estimate from a few replicas scatters, the more the fewer elements there are: the relative spread of a norm
    of n independent errors is 1 / sqrt(2 n).

    Args:
        pair: Both sides.
        distances: Relative differences of replicas from the baseline.
        storage: For an update: norm of the parameter over norm of the update.
        terms: For a gradient: rows that each of its elements is summed over. A kernel that adds one after the other
            in float32 is off by sqrt(terms) u; replicas, which all run the baseline's kernels, do not show it.
            Measured with torch on the CPU: 30 u over 512 rows (BatchNorm, channels last; 4 u otherwise).
        rounded: Largest unit roundoff on the baseline's way to here: its noise is of this size already, whatever
            the dtype of the pair (float32 parameters under autocast).
        inside: Unit roundoff of the dtype that the operation may compute in, and these replicas do not show.
    """
    left, right = pair.baseline, pair.candidate
    units = [UNIT_ROUNDOFF.get(entry.dtype, 0.0) for entry in (left, right)]
    # Noise of a shorter dtype is larger.
    shorter = max(1.0, max(units) / max(units[0], rounded)) if units[0] and max(units) else 1.0
    summation = math.sqrt(terms) * min(max(units), UNIT_ROUNDOFF["float32"])
    quantum = max(max(units) * (1.0 + storage), summation, inside)
    spread = 1.0 + 4.0 / math.sqrt(max(1, int(finite_count(left.summary))))
    return spread * max(quantum, shorter * max(distances, default=0.0))


def _hold_out(
    distances: Mapping[Key, Sequence[tuple[int, float, Pair]]],
    before: Mapping[str, Entry],
    parameters: OwnedParameters,
    constants: dict[str, float],
) -> None:
    """Raise the constants to what is needed for each replica to stay within the floors of the others."""
    adaptive = adaptive_parameters(distances)
    terms = terms_by_module(found[0][2] for found in distances.values())
    for key, found in distances.items():
        if is_quotient(key, adaptive):
            continue  # signs of small gradients: they rarely flip, and by their whole size if they do
        for index, apart, pair in found:
            others = [other for number, other, _ in found if number != index]
            if not others or not math.isfinite(apart) or int(finite_count(pair.baseline.summary)) < FEW:
                continue
            alone = basis(pair, others, storage=_storage(pair, before), terms=summed_rows(pair, terms))
            floor = alone * _further(key.path, index, parameters)
            if 0.0 < floor < math.inf:
                constants[key.phase] = max(constants.get(key.phase, 1.0), apart / floor)


def _owned_parameters(distances: Mapping[Key, Sequence[tuple[int, float, Pair]]]) -> OwnedParameters:
    owned: OwnedParameters = {}
    for key, found in distances.items():
        if key[:2] == ("param", ""):
            owned.setdefault(key.path.rpartition(".")[0], []).append({index: apart for index, apart, _ in found})
    return owned


def _further(path: str, index: int, parameters: OwnedParameters) -> float:
    """How much further from the baseline a replica's parameters of a module are than those of the others; 1 if less."""
    ratio = 1.0
    for found in parameters.get(path, ()):
        if index in found:
            others = [apart for number, apart in found.items() if number != index]
            ratio = max(ratio, found[index] / max(*others, UNIT_ROUNDOFF["float32"]) if others else 1.0)
    return ratio


def _storage(pair: Pair, before: Mapping[str, Entry]) -> float:
    key = pair.baseline.key
    if key.phase != "update" or key.path not in before:
        return 0.0
    size = float(norm(pair.baseline.summary))
    return float(norm(before[key.path].summary)) / size if size else math.inf


def _pairs(baseline: SideStep, replica: SideStep) -> list[Pair]:
    tables = join((baseline, replica))
    aligned = align(*(in_order(without_recomputed(table)) for table in tables))
    pairs = [pair for pair in aligned.pairs if not (pair.baseline.unobserved or pair.candidate.unobserved)]
    return [*pairs, *gradient_norms(pairs)]


def _apart(pair: Pair) -> float:
    size = difference(pair)
    return math.inf if size is None else size


def _replica(recording: Recording) -> str:
    return str(recording.run["settings"].get("replica") or "")


def _refuse_another_training(
    side: Side, compared: tuple[Side, SideStep, SideStep, Sequence[Pair]], step: int, *, first: bool
) -> None:
    baseline, left, right, pairs = compared
    tables = left.table, right.table
    found: list[Finding] = [*check_random_state(*tables, step=step)]
    found += check_hyper_parameters((tables[0], baseline.groups), (tables[1], side.groups), step=step)
    for pair in pairs:
        if pair.baseline.key.phase == "batch":
            found += filter(None, [check_batch(pair, step=step)])
        elif first and pair.baseline.key[:2] == ("param", "before") and pair.baseline.key.slot == "value":
            found += filter(None, [check_initial_parameter(pair, step=step)])
    if found:
        problem = Problem(
            where=f"--noise {side.recording.path}",
            what=f"is no other run of the baseline's training. In step {step}: {found[0].says}",
            fix="Record it with the baseline's script, seed and data, and record(replica=...) or nothing else changed.",
        )
        raise ConfigError("compare(noise=...)", [problem], consequence="nothing was compared")


def _refuse_what_does_not_align(recordings: Sequence[Recording], aligned: Sequence[int]) -> None:
    problems = [
        Problem(
            where=f"--noise {recording.path}",
            what="has no step and site in common with the baseline.",
            fix="Record it with the baseline's script, over the same steps.",
        )
        for recording, number in zip(recordings, aligned, strict=True)
        if not number
    ]
    if problems:
        raise ConfigError("compare(noise=...)", problems, consequence="nothing was compared")
