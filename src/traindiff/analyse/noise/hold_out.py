"""Calibrate noise floors: hold out each replica of a baseline in turn, and measure it against the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from traindiff.analyse.align.exact import (
    ChosenSettings,
    check_batch,
    check_hyper_parameters,
    check_initial_parameter,
    check_random_state,
    settings_of,
)
from traindiff.analyse.align.returned_states import ReturnedStates, check_state
from traindiff.analyse.align.side import NO_NAMES, Side, SideStep, StepsOnDemand
from traindiff.analyse.align.site_map import SideNames
from traindiff.analyse.align.unseen_beginning import drift, steps_before
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import Pair, same_bits, size_of
from traindiff.analyse.merge.run_steps import RunStep, run_steps
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.analyse.noise.gradients import summed_rows, terms_by_module
from traindiff.analyse.noise.measured import (
    FEW,
    Calibration,
    NoiseRecording,
    NoiseRun,
    Replicas,
    StepNoise,
    basis,
    is_measured,
    made_as,
    step_noise,
)
from traindiff.analyse.noise.run_floors import adaptive_parameters, is_quotient
from traindiff.core.observation import ITSELF, NO_REPLICA
from traindiff.core.steps import StepSelection
from traindiff.core.summary import UNIT_ROUNDOFF, finite_count, norm_of
from traindiff.errors import ConfigError, Problem
from traindiff.storage import Recording, Run

OwnedParameters = dict[str, list[dict[int, float]]]
"""By module, for each of its parameters: the distance of each replica from the baseline after the step before."""


def calibration_of(baseline: Recording, recordings: Sequence[Recording], selection: StepSelection) -> Calibration:
    """Measure how the noise of a baseline varies from replica to replica.

    Each replica is held out in turn and measured against the others. The largest ratio in a phase, over all sites and
    steps, is the constant that multiplies the floors of this phase.

    Args:
        baseline: The run.
        recordings: Further correct runs of the same training.
        selection: Steps to look at.

    Raises:
        ConfigError: A recording is of another training.
    """
    calibrating = Calibrating(baseline, following(recordings))
    side = Side(baseline)
    for number, run_step in enumerate(run_steps(baseline)):
        step = side.step(run_step)
        if run_step.step in selection:
            calibrating.see(run_step, step, first=number == 0)
    calibrating.refuse_what_does_not_align()
    return calibrating.calibration()


def following(recordings: Sequence[Recording]) -> list[NoiseRun]:
    """Noise recordings, each with its steps on demand."""
    return [(recording, StepsOnDemand(run_steps(recording))) for recording in recordings]


class Calibrating:
    """Measures the noise of a baseline while its replicas follow it step by step.

    Args:
        baseline: The run.
        noise: Further correct runs of the same training, and their steps.
        names: Of the baseline's sites, if a map joins some of them.
    """

    def __init__(self, baseline: Run, noise: Sequence[NoiseRun], names: SideNames = NO_NAMES) -> None:
        self._baseline = baseline
        self._groups = Side(baseline, names=names).groups
        self._runs = [run for run, _ in noise]
        self._replicas = Replicas(noise, names)
        self._seen = [_Seen(made_as(run)) for run in self._runs]
        self._settings = ChosenSettings()
        self._state, self._states = ReturnedStates(), [ReturnedStates() for _ in self._runs]
        self._constants: dict[str, float] = {}
        self._covered: set[tuple[str, int]] = set()
        self._parameters: OwnedParameters = {}

    def see(self, run_step: RunStep, step: SideStep, *, first: bool) -> StepNoise:
        """Hold the replicas against each other in one step of the baseline; steps must be given in order.

        Args:
            run_step: The step, as it was recorded.
            step: The same, as a side of a comparison.
            first: Whether it is the first that the baseline has.

        Returns:
            Distances of the replicas that differ from the baseline at all, so far.

        Raises:
            ConfigError: A recording is of another training.
        """
        distances: dict[SiteKey, list[tuple[int, float, Pair]]] = {}
        of_runs: list[list[Pair]] = []
        self._state.see([part.table for part in (*step.earlier, step)])
        for index, (own, pairs) in enumerate(self._replicas.pairs(run_step, step)):
            of_runs.append(pairs)
            if own is None:
                continue
            self._refuse_another_training(index, (step, own, pairs), run_step.step, first=first)
            self._covered.add((run_step.optimizer, run_step.step))
            seen = self._seen[index]
            seen.partial = seen.partial or _partial(own)
            seen.aligned += len(pairs)
            seen.whole = seen.whole and _observed(step) <= _observed(own)
            for pair in pairs:
                if is_measured(pair.baseline.key):
                    size = size_of(pair)
                    seen.note(pair.baseline.key, run_step.step, size)
                    seen.differs = seen.differs or size > 0.0 or same_bits(pair) is False
                    distances.setdefault(pair.baseline.key, []).append((index, size, pair))
        _hold_out(distances, step.before, self._parameters, self._constants)
        self._parameters = _owned_parameters(distances)
        return step_noise(pairs for pairs, seen in zip(of_runs, self._seen, strict=True) if seen.differs)

    @property
    def earlier(self) -> Sequence[StepNoise]:
        """Distances in the evaluations of the loss before the last one, of the latest step."""
        return self._replicas.earlier

    def calibration(self) -> Calibration:
        """The calibration from the steps so far."""
        repeated = [one.largest for one in self._seen if not one.replica and one.largest is not None]
        return Calibration(
            recordings=tuple(
                NoiseRecording(
                    path=run.path, replica=one.replica, differs=one.differs, whole=one.whole, partial=one.partial
                )
                for run, one in zip(self._runs, self._seen, strict=True)
            ),
            constants=dict(self._constants),
            own=max(repeated, key=lambda found: found[0], default=None),
            covered=frozenset(self._covered),
        )

    def refuse_what_does_not_align(self) -> None:
        """Raise `ConfigError` if a recording has nothing in common with the baseline."""
        problems = [
            Problem(
                where=f"noise {run.path}",
                what="has no step and site in common with the baseline.",
                fix="Record it with the baseline's script, over the same steps.",
            )
            for run, one in zip(self._runs, self._seen, strict=True)
            if not one.aligned
        ]
        if problems:
            raise ConfigError("compare(noise=...)", problems, consequence="nothing was compared")

    def _refuse_another_training(
        self, index: int, compared: tuple[SideStep, SideStep, Sequence[Pair]], step: int, *, first: bool
    ) -> None:
        expected, actual, pairs = compared
        side = self._replicas.sides[index]
        before = steps_before((self._baseline, side.recording), step, pairs) if first else 0
        beginning = (pair for pair in pairs if pair.baseline.key[:2] == ("param", "before"))
        may_be_drift = drift(beginning, before) < math.inf
        tables = expected.table, actual.table
        self._states[index].see([part.table for part in (*actual.earlier, actual)])
        found: list[Finding] = [*check_random_state(*tables, step=step)]
        settings = self._settings.of(settings_of(tables[0], self._groups)), settings_of(tables[1], side.groups)
        found += check_hyper_parameters(*settings, step=step)
        noise = self._seen[index].returned
        for pair in pairs:
            if pair.baseline.key.phase == "batch":
                found += filter(None, [self._check_batch(index, pair, step=step, noise=noise)])
            elif pair.baseline.key.phase == "forward" and math.isfinite(size := size_of(pair)):
                noise = max(noise, size)
            elif first and pair.baseline.key[:2] == ("param", "before") and pair.baseline.key.slot == "value":
                one = check_initial_parameter(pair, step=step, steps_before=before, may_be_drift=may_be_drift)
                found += filter(None, [one])
        if found:
            problem = Problem(
                where=f"noise {side.recording.path}",
                what=f"is no other run of the baseline's training. In step {step}: {found[0].message}",
                fix="Record it with the baseline's script, seed and data, and record(replica=...) or nothing else "
                "changed.",
            )
            raise ConfigError("compare(noise=...)", [problem], consequence="nothing was compared")
        self._seen[index].returned = noise

    def _check_batch(self, index: int, pair: Pair, *, step: int, noise: float) -> Finding | None:
        """What is wrong with an input of a replica; a state, or what is computed, may differ by its noise."""
        other = check_batch(pair, step=step)
        if other is None:
            return None
        found = check_state(pair, other, (self._state.sources, self._states[index].sources), noise=noise)
        return found if isinstance(found, Finding) else None


@dataclass(slots=True)
class _Seen:
    """Results for one noise recording so far.

    Attributes:
        replica: How it was made.
        partial: Why it is not a full replica.
        aligned: Number of sites in common with the baseline, over all steps.
        whole: Whether it has had every site of the baseline.
        differs: Whether it differs from the baseline at all.
        returned: Largest difference so far of what modules returned.
        largest: Its largest difference from the baseline, and the place.
    """

    replica: str
    partial: str = ""
    aligned: int = 0
    whole: bool = True
    differs: bool = False
    returned: float = 0.0
    largest: tuple[float, str] | None = None

    def note(self, key: SiteKey, step: int, size: float) -> None:
        """Remember the largest difference; of several equal ones, the first."""
        if self.largest is None or size > self.largest[0]:
            self.largest = (size, f"step {step}, {key.phase} of {key.path} {key.slot}")


def _observed(step: SideStep) -> set[SiteKey]:
    return {key for key, entry in step.table.items() if not entry.unobserved and is_measured(key)}


def _partial(step: SideStep) -> str:
    """The reason, from its recording, why a training was not fully perturbed; empty if it was."""
    said = (entry.unobserved for key, entry in step.table.items() if key.path == ITSELF)
    return next((reason for reason in said if reason.startswith(NO_REPLICA)), "")


def _hold_out(
    distances: Mapping[SiteKey, Sequence[tuple[int, float, Pair]]],
    before: Mapping[str, MergedSite],
    parameters: OwnedParameters,
    constants: dict[str, float],
) -> None:
    """Raise the constants so that each replica stays within the floors measured from the others."""
    adaptive = adaptive_parameters(distances)
    terms = terms_by_module(found[0][2] for found in distances.values())
    for key, found in distances.items():
        if is_quotient(key, adaptive):
            continue  # signs of small gradients rarely flip, and change by their whole size if they do
        for index, apart, pair in found:
            others = [other for number, other, _ in found if number != index]
            if not others or not math.isfinite(apart) or int(finite_count(pair.baseline.summary)) < FEW:
                continue
            alone = basis(pair, others, storage=_storage(pair, before), terms=summed_rows(pair, terms))
            floor = alone * _further(key.path, index, parameters)
            if 0.0 < floor < math.inf:
                constants[key.phase] = max(constants.get(key.phase, 1.0), apart / floor)


def _owned_parameters(distances: Mapping[SiteKey, Sequence[tuple[int, float, Pair]]]) -> OwnedParameters:
    owned: OwnedParameters = {}
    for key, found in distances.items():
        if key[:2] == ("param", ""):
            owned.setdefault(key.path.rpartition(".")[0], []).append({index: apart for index, apart, _ in found})
    return owned


def _further(path: str, index: int, parameters: OwnedParameters) -> float:
    """Ratio of a replica's parameter differences in a module to those of the other replicas; at least 1."""
    ratio = 1.0
    for found in parameters.get(path, ()):
        if index in found:
            others = [apart for number, apart in found.items() if number != index]
            ratio = max(ratio, found[index] / max(*others, UNIT_ROUNDOFF["float32"]) if others else 1.0)
    return ratio


def _storage(pair: Pair, before: Mapping[str, MergedSite]) -> float:
    key = pair.baseline.key
    if key.phase != "update" or key.path not in before:
        return 0.0
    size = norm_of(pair.baseline.summary)
    return norm_of(before[key.path].summary) / size if size else math.inf
