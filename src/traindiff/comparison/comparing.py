"""`traindiff.compare`: two recordings to a verdict."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from traindiff.comparison.alignment import (
    Pair,
    Rename,
    Renaming,
    align,
    in_baseline_order,
    num_micro_steps,
    parse_renames,
)
from traindiff.comparison.boundaries import without_boundaries
from traindiff.comparison.circumstances import circumstances, not_forced, other_dtypes, other_models
from traindiff.comparison.clipping import clip_factor, clipping_findings, clipping_note, clips, with_stages
from traindiff.comparison.derived import gradient_norms
from traindiff.comparison.each_ranks_own import with_each_ranks_own
from traindiff.comparison.engine_settings import coefficient_error, explained
from traindiff.comparison.exact import (
    EXACT_KINDS,
    check_hyper_parameters,
    check_random_state,
    one_step_late,
    settings_of,
)
from traindiff.comparison.failed_taps import FailedTaps, without_lost
from traindiff.comparison.judge import Judge, StepInput
from traindiff.comparison.loss_scale import loss_scale, scale_factors, scale_note
from traindiff.comparison.measure import Tolerance, parse_tolerance
from traindiff.comparison.noise import Calibration, Replicas, StepNoise, calibrate
from traindiff.comparison.one_run import BothRuns, run_facts
from traindiff.comparison.pairing import RunStep, run_steps, step_pairs
from traindiff.comparison.presence import Presence
from traindiff.comparison.recomputation import recomputation_findings, without_recomputed
from traindiff.comparison.samples import samples_of
from traindiff.comparison.sentences import representation_note
from traindiff.comparison.side import Side, SideStep, in_order, join
from traindiff.comparison.step_table import Entry, Key
from traindiff.comparison.surroundings import Surroundings, surroundings, with_surroundings
from traindiff.comparison.tying import copies_elsewhere, ties_of, with_names
from traindiff.comparison.unplaced import without_unplaced
from traindiff.comparison.verdict import Comparison, Finding, Word
from traindiff.errors import ConfigError, Problem
from traindiff.recording import Recording, open_recording
from traindiff.site import ROOT, label
from traindiff.steps import StepSelection, parse_steps
from traindiff.summary import add

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
    return _Comparing(runs, replicas, renames, selection, tolerance).run(progress)


class _Comparing:
    """The state of one comparison while it walks through the steps."""

    def __init__(
        self,
        runs: tuple[Recording, Recording],
        noise: Sequence[Recording],
        rename: Renaming,
        selection: StepSelection,
        tolerance: Tolerance | None,
    ) -> None:
        self._runs = runs
        self._selection = selection
        self._rename = rename
        left, right = self._sides = (Side(runs[0]), Side(runs[1], rename))
        self._presence = Presence(
            known=(left.paths, _renamed(right.paths, rename)),
            held=(left.held, right.held),
            recorded=(left.recorded, right.recorded),
            ranks=(len(runs[0].ranks), len(runs[1].ranks)),
        )
        self._copies = (
            copies_elsewhere(runs[0], ties_of(runs[1], rename)),
            copies_elsewhere(runs[1], ties_of(runs[0]), rename),
        )
        self._each = BothRuns((run_facts(runs[0]), run_facts(runs[1], rename)))
        self._calibration = calibrate(runs[0], noise, selection) if noise else Calibration()
        by_path = {recording.path: recording for recording in noise}
        self._replicas = Replicas([by_path[path] for path in self._calibration.names])
        self._forced = bool(runs[1].run.get("forced_by"))
        coefficients = coefficient_error(run.rank_content(rank) for run in runs for rank in run.ranks)
        self._judge = Judge(tolerance, self._calibration, forced=self._forced, coefficients=coefficients)
        self._failed = (FailedTaps(), FailedTaps())
        self._surroundings: Surroundings | None = None
        self._compared: list[int] = []
        self._uncovered: list[int] = []
        self._notes: dict[str, None] = {}
        self._alone: tuple[list[int], list[int]] = ([], [])
        self._other_dtypes: dict[tuple[str, str], set[Key]] = {}
        self._settings_before: dict[tuple[str, str], tuple[float, Entry]] = {}
        self._settings_reported: set[tuple[str, Any, Any]] = set()

    def run(self, progress: Progress | None) -> Comparison:
        steps = [run_steps(run, copies) for run, copies in zip(self._runs, self._copies, strict=True)]
        for left, right in step_pairs(*steps):
            if left is not None and right is not None:
                self._step(left, right)
                if progress:
                    progress(left.step)
            elif (alone := left or right) is not None:
                side = 0 if left else 1
                self._sides[side].step(alone)  # the next step begins where this one ended
                if alone.finished and alone.step in self._selection:
                    self._alone[side].append(alone.step)
            for one in (left, right):
                if one is not None:
                    one.release()
        notes, incomplete = self._limits()
        findings, representation = self._judge.findings, ()
        if findings and self._surroundings:
            findings = (with_surroundings(findings[0], self._surroundings), *findings[1:])
        sizes = (self._sides[0].data_parallel, self._sides[1].data_parallel)
        divided = sizes.index(max(sizes))
        modules = run_facts(self._runs[divided], self._rename if divided else str).modules
        findings = (*(with_each_ranks_own(one, modules, sizes) for one in findings[:1]), *findings[1:])
        findings = (*(explained(one, self._runs[0].run, self._runs[1].run) for one in findings[:1]), *findings[1:])
        if not self._forced and self._judge.only_representation_differs:
            findings, representation = (), findings
            notes.insert(0, representation_note(representation))
        return Comparison(
            baseline=self._runs[0].path,
            candidate=self._runs[1].path,
            verdict=self._word(findings, incomplete=incomplete),
            calibrated=bool(self._calibration.names) and not (self._uncovered or self._calibration.partial),
            noise=self._calibration.to_json(),
            findings=findings,
            representation=representation,
            unaligned=self._presence.sides(),
            steps=tuple(dict.fromkeys(self._compared)),
            notes=tuple(notes),
            differences=tuple(sorted(self._judge.differences.values(), key=lambda row: row.order)),
        )

    def _step(self, left: RunStep, right: RunStep) -> None:
        for failed, step in zip(self._failed, (left, right), strict=True):
            failed.see(step.table, step=step.step)
        sides = (self._sides[0].step(left), self._sides[1].step(right))
        if left.step not in self._selection:
            return
        tables = self._with_stages(join(sides))
        lost = (*self._failed[0].lost, *self._failed[1].lost)
        tables = without_lost(tables[0], lost), without_lost(tables[1], lost)
        tables = without_unplaced(tables[0], tables[1]), without_unplaced(tables[1], tables[0])
        if left.missing != right.missing:  # of the same ranks of both runs, what they have is compared
            tables = (
                self._sides[0].without_missing(tables[0], left), self._sides[1].without_missing(tables[1], right)
            )  # fmt: skip
        first = not self._compared
        self._compared.append(left.step)
        aligned = align(*(in_order(without_boundaries(without_recomputed(table))) for table in tables))
        for side, step in zip(self._sides, (left, right), strict=True):
            if step.missing and side.is_pipeline:
                self._presence.lack_stages.add(self._sides.index(side))
        pairs, findings = self._presence.judge(aligned, step=left.step)
        for pair in pairs:
            if pair.baseline.dtype != pair.candidate.dtype:
                dtypes = (pair.baseline.dtype, pair.candidate.dtype)
                self._other_dtypes.setdefault(dtypes, set()).add(pair.baseline.key)
        clipped = (clips(tables[0]), clips(tables[1]))
        scales = (loss_scale(tables[0]), loss_scale(tables[1]))
        findings += clipping_findings(*clipped, step=left.step)
        self._notes.update(dict.fromkeys(filter(None, (clipping_note(*clipped), scale_note(*scales)))))
        findings += recomputation_findings(tables[0], tables[1], step=left.step)
        found = self._each.findings(tables, step=left.step)
        findings += [with_names(one, self._copies[one.evidence["run"] == "candidate"], self._rename) for one in found]
        if not self._forced:  # there it is no operation's result: it follows from gradients that were judged
            pairs = [*pairs, *gradient_norms(pairs)]
        place = in_baseline_order(aligned.pairs)
        findings = [replace(one, order=place(one.order)) if _is_of_candidate(one) else one for one in findings]
        findings += check_random_state(tables[0], tables[1], step=left.step)
        findings += self._hyper_parameters(tables, left.step)
        agreed = not self._judge.findings
        micro_steps = [num_micro_steps(table) for table in tables]
        self._judge.judge(
            StepInput(
                step=left.step,
                first=first,
                pairs=tuple(sorted(pairs, key=lambda pair: pair.baseline.order)),
                found=tuple(findings),
                contributions=_contributions(tables[1]),
                parameters=_both(sides[0].before, sides[1].before),
                micro_steps=micro_steps[1],
                most_micro_steps=max(micro_steps),
                ranks=max(side.data_parallel for side in self._sides),
                samples=max((int(e.summary["count"]) for k, e in tables[0].items() if k.phase == "batch"), default=1),
                batches=(samples_of(tables[0]), samples_of(tables[1])),
                noise=self._noise(left, sides[0]),
                factors=(*scale_factors(*scales), *clip_factor(*clipped)),
            )
        )
        if agreed and self._judge.findings:
            self._surroundings = surroundings(self._judge.findings[0], pairs, aligned)

    def _with_stages(
        self, tables: tuple[dict[Key, Entry], dict[Key, Entry]]
    ) -> tuple[dict[Key, Entry], dict[Key, Entry]]:
        left, right = ("grad.stages" in side.recorded for side in self._sides)
        return with_stages(tables[0], tables[1], asked=left), with_stages(tables[1], tables[0], asked=right)

    def _noise(self, step: RunStep, side: SideStep) -> StepNoise | None:
        if not self._calibration.names:
            return None
        if (step.optimizer, step.step) in self._calibration.covered:
            return self._replicas.noise(step, side)
        self._uncovered.append(step.step)
        return None

    def _hyper_parameters(self, tables: tuple[dict[Key, Entry], dict[Key, Entry]], step: int) -> list[Finding]:
        groups = [side.groups for side in self._sides]
        found = check_hyper_parameters((tables[0], groups[0]), (tables[1], groups[1]), step=step)
        fresh = []
        for finding in found:
            change = (finding.slot, finding.evidence["baseline"], finding.evidence["candidate"])
            if change not in self._settings_reported:
                self._settings_reported.add(change)
                fresh.append(one_step_late(finding, self._settings_before))
        settings = settings_of(tables[0], groups[0])
        self._settings_before = {what: (value, replace(entry, parts=())) for what, (value, entry) in settings.items()}
        return fresh

    def _limits(self) -> tuple[list[str], bool]:
        """What limits the verdict, in sentences, and whether that leaves it incomplete."""
        notes = [
            f"{name}: {status.says}"
            for name, run in zip(("baseline", "candidate"), self._runs, strict=True)
            for rank in run.ranks
            if (status := run.status(rank)).says
        ]
        parts = (self._failures(), self._missing_ranks(), self._missing_steps(), self._not_compared())
        notes += [note for found, _ in parts for note in found]
        notes = [*self._calibration.notes(uncovered=self._uncovered), *notes]
        incomplete = any(missing for _, missing in parts) or any(self._presence.unaligned)
        notes += [*self._each.shared.values(), *self._each.unknown.values()]
        notes += [f"{label(one.path, one.slot)}: {one.why}." for one in self._presence.sides()[0] if one.why][:3]
        if self._judge.turned:
            notes.append(
                f"A choice of rows (of a router, of a mask) that rounding may turn was made otherwise, first at "
                f"{self._judge.turned[0]}. What follows in such a step was not judged."
            )
        if self._judge.nan_in_both:
            notes.append(f"NaN at the same places in both runs, first at {self._judge.nan_in_both[0]}.")
        notes += [f"--rename {rule} changes no path of the candidate." for rule in self._rename.unused]
        notes += other_models((self._sides[0].model, self._sides[1].model), self._presence.known)
        notes += other_dtypes(self._other_dtypes)
        notes += self._notes
        notes += not_forced([self._runs[1].rank_content(rank) for rank in self._runs[1].ranks])
        return [*notes, *circumstances(self._runs[0].run, self._runs[1].run)], incomplete

    def _failures(self) -> tuple[list[str], bool]:
        notes = [
            f"{name}: {says[0].lower()}{says[1:]}"
            for name, failed in zip(("baseline", "candidate"), self._failed, strict=True)
            for says in failed.notes()
        ]
        return notes, bool(notes)

    def _missing_ranks(self) -> tuple[list[str], bool]:
        notes = [
            f"{name}: rank {', '.join(map(str, run.missing_ranks))} left no recording.{_lost_stages(side)}"
            for name, run, side in zip(("baseline", "candidate"), self._runs, self._sides, strict=True)
            if run.missing_ranks
        ]
        return notes, bool(notes)

    def _missing_steps(self) -> tuple[list[str], bool]:
        if not self._compared:
            groups = [side.groups.keys() for side in self._sides]
            names = [", ".join(sorted(one)) for one in groups]
            if all(names) and not groups[0] & groups[1]:
                says = (
                    f"The optimizers have other names: {names[0]} in the baseline, {names[1]} in the candidate. Steps "
                    "are counted per optimizer; record both runs with the same names: optimizer={NAME: optimizer}."
                )
                return [says], True
            return [_nothing_in_common(self._runs, self._alone)], True
        notes = []
        for side, alone in enumerate(self._alone):
            ended = self._sides[1 - side]
            after = [step for step in alone if step > self._compared[-1] and ended.would_record(step)]
            if after:
                steps = "1 later step of the other run was" if len(after) == 1 else f"{len(after)} later steps were"
                notes.append(
                    f"The {('candidate', 'baseline')[side]} ends after step {self._compared[-1]}; {steps} "
                    "not compared. (--steps compares a part on purpose.)"
                )
        return notes, bool(notes)

    def _not_compared(self) -> tuple[list[str], bool]:
        notes, incomplete = [], False
        if self._presence.unobserved:
            incomplete = True
            site, why = next(iter(self._presence.unobserved.items()))
            more = len(self._presence.unobserved) - 1
            notes.append(f"Not observed, so unknown: {site} ({why}){f' and {more} more sites' if more else ''}.")
        for name, missing in zip(("baseline", "candidate"), self._presence.not_recorded, strict=True):
            if missing:
                notes.append(f"Not recorded in the {name}, so not compared: {', '.join(missing)}.")
                # Evaluation and micro-batches come on top; without a whole phase the rest is a part.
                incomplete |= bool(missing.keys() - {"evaluation", "grad.micro", "grad.stages"})
        return notes, incomplete

    def _word(self, findings: Sequence[Finding], *, incomplete: bool) -> Word:
        if findings:
            return "misaligned" if findings[0].kind in EXACT_KINDS else "diverged"
        if incomplete:
            return "incomplete"
        return "identical" if self._judge.all_equal else "equivalent"


def _renamed(paths: Iterable[str], rename: Rename) -> frozenset[str]:
    """The candidate's paths under the baseline's names, which must stay distinct."""
    by_name: dict[str, list[str]] = {}
    for path in sorted(paths):
        by_name.setdefault(rename(path), []).append(path)
    problems = [
        Problem(
            where="--rename",
            what=f"gives {' and '.join(path or ROOT for path in same)} of the candidate one name, {name or ROOT}.",
            fix="Write expressions that keep the candidate's paths apart.",
        )
        for name, same in by_name.items()
        if len(same) > 1
    ]
    if problems:
        raise ConfigError("compare(...)", problems, consequence="nothing was compared")
    return frozenset(by_name)


def _lost_stages(side: Side) -> str:
    """What of a pipeline only ranks have that left no recording."""
    here = {stage for rank in side.recording.ranks for stage in side.stages_of(rank)}
    stages = sorted({stage for rank in side.recording.missing_ranks for stage in side.stages_of(rank)} - here)
    if not stages:
        return ""
    return f" Not recorded, so not compared: stage {', '.join(map(str, stages))} of the pipeline."


def _is_of_candidate(finding: Finding) -> bool:
    """Whether its place in execution order was read off the candidate."""
    return finding.kind in ("extra", "recomputed") or finding.evidence.get("run") == "candidate"


def _contributions(table: Mapping[Key, Entry]) -> dict[str, dict[tuple[int, int], Any]]:
    """What each micro-batch brought to each gradient, by micro-step and rank; of copies on several ranks one."""
    found: dict[str, dict[tuple[int, int], Any]] = {}
    for key, entry in table.items():
        if key.phase != "grad" or key.stage != "micro" or key.call or entry.unobserved:
            continue
        terms = {(part.micro_step, part.term, part.shard): part for part in reversed(entry.parts)}
        by_place: dict[tuple[int, int], list[Any]] = {}
        for part in terms.values():
            by_place.setdefault((part.micro_step, part.rank), []).append(part.summary)
        found[key.path] = {place: add(parts) for place, parts in sorted(by_place.items())}
    return found


def _both(baseline: Mapping[str, Entry], candidate: Mapping[str, Entry]) -> dict[str, Pair]:
    return {
        path: Pair(baseline=entry, candidate=candidate[path])
        for path, entry in baseline.items()
        if path in candidate and candidate[path].shape == entry.shape
    }


def _nothing_in_common(runs: tuple[Recording, Recording], alone: tuple[list[int], list[int]]) -> str:
    for name, run, steps in zip(("baseline", "candidate"), runs, alone, strict=True):
        if not steps:
            return (
                f"The {name} ({run.path}) has no finished step among those asked for. Record it until the optimizer "
                "has stepped, or ask for other steps."
            )
    return (
        f"The recordings have no step in common: the baseline has steps {alone[0][0]} to {alone[0][-1]}, "
        f"the candidate {alone[1][0]} to {alone[1][-1]}."
    )
