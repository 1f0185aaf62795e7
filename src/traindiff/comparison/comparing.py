"""`traindiff.compare`: two recordings to a verdict."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from traindiff.alignment.exact import EXACT_KINDS, check_random_state
from traindiff.alignment.gradient_norms import gradient_norms
from traindiff.alignment.hyper_parameters import SettingChanges
from traindiff.alignment.pairs import in_baseline_order
from traindiff.alignment.two_runs import RUNS, AlignedStep, TwoRuns
from traindiff.comparison.batch_statistics import of_batch_statistics
from traindiff.comparison.both_runs import BothRuns
from traindiff.comparison.circumstances import circumstances, not_forced, other_dtypes, other_models
from traindiff.comparison.clipping import clip_factor, clipping_findings, clipping_note
from traindiff.comparison.contributions import contributions
from traindiff.comparison.each_ranks_own import with_each_ranks_own
from traindiff.comparison.engine_settings import coefficient_error, explained
from traindiff.comparison.judge import Judge
from traindiff.comparison.limits import hints, limits
from traindiff.comparison.loss_scales import scale_factors, scale_note
from traindiff.comparison.recomputation import recomputation_findings
from traindiff.comparison.sentences import representation_note
from traindiff.comparison.step_judge import StepInput
from traindiff.comparison.surroundings import Surroundings, surroundings, with_surroundings
from traindiff.comparison.targets import of_unseen_targets
from traindiff.comparison.tied_copies import with_names
from traindiff.comparison.verdict import Comparison, Word
from traindiff.errors import ConfigError, Problem
from traindiff.findings import Finding
from traindiff.floors.calibrating import calibrate
from traindiff.floors.calibration import Calibration
from traindiff.floors.replicas import Replicas, StepNoise
from traindiff.floors.tolerance import Tolerance, parse_tolerance
from traindiff.merging.clips import clips
from traindiff.merging.loss_scale import loss_scale
from traindiff.merging.renames import Renaming, parse_renames
from traindiff.merging.samples import samples_of
from traindiff.merging.step_table import Key, num_micro_steps
from traindiff.recording import Recording, open_recording
from traindiff.rules import run_facts
from traindiff.steps import StepSelection, parse_steps

Progress = Callable[[int], None]
"""Called with the number of each step after it was compared."""


def compare(
    baseline: str | os.PathLike[str],
    candidate: str | os.PathLike[str],
    *,
    noise: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    rename: Mapping[str, str] | Sequence[str] | None = None,
    steps: str | int | Iterable[int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two recordings and name the first divergence.

    Args:
        baseline: Recording of the run that is trusted: a local path or any fsspec URL.
        candidate: Recording of the run in question.
        noise: Recordings of further correct runs of the baseline's training: replicas
            (`record(replica=...)`), or the baseline simply run again. Floors are measured from them, and the
            verdict is calibrated.
        rename: Regular expressions and replacements that turn the candidate's paths into the
            baseline's.
        steps: Steps to compare, e.g. `"0-9,20"`. Default: all that both have.
        rtol: Relative tolerance in place of floors: `||c - b|| <= rtol ||b|| + atol sqrt(n)`.
        atol: Absolute tolerance per element, in the same formula.
        progress: Called after each step.

    Returns:
        The comparison; `print` it, or see `verdict`, `first_divergence` and `findings`.

    Raises:
        ConfigError: A setting is wrong.
        RecordingError: One of the recordings cannot be used.
    """
    selection = parse_steps(steps, where="compare(steps=...)")
    if not isinstance(selection, StepSelection):
        raise ConfigError("compare(...)", [selection], consequence="nothing was compared")
    tolerance = parse_tolerance(rtol, atol)
    renames = parse_renames(rename)
    runs = (open_recording(os.fspath(baseline)), open_recording(os.fspath(candidate)))
    paths = [noise] if isinstance(noise, (str, os.PathLike)) else noise
    replicas = [open_recording(os.fspath(path)) for path in paths]
    _refuse_candidate_as_noise(runs[1], replicas)
    return _Comparing(TwoRuns(runs, renames, selection), replicas, renames, selection, tolerance).run(progress)


def _refuse_candidate_as_noise(candidate: Recording, noise: Sequence[Recording]) -> None:
    """Raise `ConfigError` where the run in question is to say how far correct runs may be."""
    held = os.path.realpath(candidate.path)
    problems = [
        Problem(
            where=f"noise {recording.path}",
            what="is the candidate. Floors that are measured from it are above every difference that it has.",
            fix="Give recordings of runs that are known to be correct: replicas, or the baseline run again.",
        )
        for recording in noise
        if os.path.realpath(recording.path) == held
    ]
    if problems:
        raise ConfigError("compare(noise=...)", problems, consequence="nothing was compared")


class _Comparing:
    """The state of one comparison while it walks through the steps."""

    def __init__(
        self,
        runs: TwoRuns,
        noise: Sequence[Recording],
        rename: Renaming,
        selection: StepSelection,
        tolerance: Tolerance | None,
    ) -> None:
        self._runs = runs
        self._rename = rename
        baseline, candidate = runs.recordings
        self._facts = (run_facts(baseline), run_facts(candidate, rename))
        self._both = BothRuns(self._facts)
        self._calibration = calibrate(baseline, noise, selection) if noise else Calibration()
        differing = {one.path for one in self._calibration.replicas}
        self._replicas = Replicas([recording for recording in noise if recording.path in differing])
        self._forced = bool(candidate.run.get("forced_by"))
        coefficients = coefficient_error(run.rank_content(rank) for run in runs.recordings for rank in run.ranks)
        self._judge = Judge(tolerance, self._calibration, forced=self._forced, coefficients=coefficients)
        self._settings = SettingChanges()
        self._surroundings: Surroundings | None = None
        self._aside = ""
        self._uncovered: list[int] = []
        self._notes: dict[str, None] = {}
        self._other_dtypes: dict[tuple[str, str], set[Key]] = {}

    def run(self, progress: Progress | None) -> Comparison:
        self._runs.each_step(partial(self._step, progress))
        baseline, candidate = self._runs.recordings
        notes, incomplete = limits(self._runs)
        notes = [*self._calibration.notes(uncovered=self._uncovered), *notes, *self._further_notes()]
        findings, representation = self._explained(self._judge.findings), ()
        if not self._forced and self._judge.only_representation_differs:
            findings, representation = (), findings
            notes.insert(0, representation_note(representation))
        calibration = self._calibration
        return Comparison(
            baseline=baseline.path,
            candidate=candidate.path,
            verdict=self._word(findings, incomplete=incomplete),
            calibrated=bool(calibration.replicas) and not (self._uncovered or calibration.is_partial),
            noise=calibration.to_json(),
            findings=findings,
            representation=representation,
            unaligned=self._runs.presence.sides(),
            steps=tuple(dict.fromkeys(self._runs.compared)),
            notes=tuple(notes),
            differences=tuple(sorted(self._judge.judged.differences.values(), key=lambda row: row.order)),
        )

    def _step(self, progress: Progress | None, given: AlignedStep) -> None:
        step, tables, pairs = given.step, given.tables, given.pairs
        for pair in pairs:
            if pair.baseline.dtype != pair.candidate.dtype:
                dtypes = (pair.baseline.dtype, pair.candidate.dtype)
                self._other_dtypes.setdefault(dtypes, set()).add(pair.baseline.key)
        clipped = (clips(tables[0]), clips(tables[1]))
        scales = (loss_scale(tables[0]), loss_scale(tables[1]))
        self._notes.update(dict.fromkeys(filter(None, (clipping_note(*clipped), scale_note(*scales)))))
        found = [
            *given.findings,
            *clipping_findings(*clipped, step=step),
            *recomputation_findings(*tables, step=step),
            *map(self._with_names, self._both.findings(tables, step=step)),
        ]
        place = in_baseline_order(given.aligned.pairs)
        found = [replace(one, order=place(one.order)) if _is_of_candidate(one) else one for one in found]
        found += check_random_state(*tables, step=step)
        found += self._settings.findings(self._runs.sides, tables, step=step)
        if not self._forced:  # there it is no operation's result: it follows from gradients that were judged
            pairs = [*pairs, *gradient_norms(pairs)]
        agreed = not self._judge.findings
        micro_steps = [num_micro_steps(table) for table in tables]
        self._judge.judge(
            StepInput(
                step=step,
                first=given.first,
                pairs=tuple(sorted(pairs, key=lambda pair: pair.baseline.order)),
                found=tuple(found),
                contributions=contributions(tables[1]),
                parameters=given.parameters,
                micro_steps=micro_steps[1],
                most_micro_steps=max(micro_steps),
                ranks=max(side.data_parallel for side in self._runs.sides),
                samples=max((int(e.summary["count"]) for k, e in tables[0].items() if k.phase == "batch"), default=1),
                batches=(samples_of(tables[0]), samples_of(tables[1])),
                noise=self._noise(given),
                factors=tuple(scale_factors(*scales)),
                clipped=tuple(clip_factor(*clipped)),
            )
        )
        if agreed and self._judge.findings:
            first = self._judge.findings[0]
            self._surroundings = surroundings(first, pairs, given.aligned)
            divided = (micro_steps[0], micro_steps[1])
            self._aside = of_batch_statistics(first, self._facts[0].modules, given.aligned, divided)
            self._aside += of_unseen_targets(first, pairs)
        if progress:
            progress(step)

    def _with_names(self, finding: Finding) -> Finding:
        copies = self._runs.copies[RUNS.index(finding.evidence["run"])]
        return with_names(finding, copies, self._rename)

    def _noise(self, given: AlignedStep) -> StepNoise | None:
        if not self._calibration.replicas:
            return None
        if (given.baseline.optimizer, given.step) in self._calibration.covered:
            return self._replicas.noise(given.baseline, given.sides[0])
        self._uncovered.append(given.step)
        return None

    def _explained(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """The findings, of which the first says what is known of its surroundings and causes."""
        if not findings:
            return ()
        first, *rest = findings
        first = replace(first, says=first.says + self._aside)
        if self._surroundings:
            first = with_surroundings(first, self._surroundings)
        sizes = (self._runs.sides[0].data_parallel, self._runs.sides[1].data_parallel)
        first = with_each_ranks_own(first, self._facts[sizes.index(max(sizes))].modules, sizes)
        return (explained(first, *(recording.run for recording in self._runs.recordings)), *rest)

    def _further_notes(self) -> list[str]:
        """What is worth knowing, whatever the verdict."""
        baseline, candidate = self._runs.recordings
        notes = [*self._both.shared.values(), *self._both.unknown, *hints(self._runs)]
        if self._judge.judged.turned:
            notes.append(
                f"A choice of rows (of a router, of a mask) that rounding may turn was made otherwise, first at "
                f"{self._judge.judged.turned[0]}. What follows in such a step was not judged."
            )
        if self._judge.judged.nan_in_both:
            notes.append(f"NaN at the same places in both runs, first at {self._judge.judged.nan_in_both[0]}.")
        notes += [f"--rename {rule} changes no path of the candidate." for rule in self._rename.unused]
        notes += other_models((self._runs.sides[0].model, self._runs.sides[1].model), self._runs.presence.known)
        notes += other_dtypes(self._other_dtypes)
        notes += self._notes
        notes += not_forced([candidate.rank_content(rank) for rank in candidate.ranks])
        return [*notes, *circumstances(baseline.run, candidate.run)]

    def _word(self, findings: Sequence[Finding], *, incomplete: bool) -> Word:
        if findings:
            return "misaligned" if findings[0].kind in EXACT_KINDS else "diverged"
        if incomplete:
            return "incomplete"
        return "identical" if self._judge.judged.all_equal else "equivalent"


def _is_of_candidate(finding: Finding) -> bool:
    """Whether its place in execution order was read off the candidate."""
    return finding.kind in ("extra", "recomputed") or finding.evidence.get("run") == "candidate"
