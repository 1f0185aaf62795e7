"""Two runs to a verdict, one step after the other."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from traindiff.analyse.align.exact import (
    EXACT_KINDS,
    ConstantBuffers,
    SettingChanges,
    check_random_state,
    other_buffers,
)
from traindiff.analyse.align.pairs import in_baseline_order
from traindiff.analyse.align.side import RUNS, gradient_norms
from traindiff.analyse.align.two_runs import AlignedStep, RepeatedStep, TwoRuns, are_replayed
from traindiff.analyse.align.unseen_beginning import drift, steps_before
from traindiff.analyse.compare.accepted import without_accepted
from traindiff.analyse.compare.bits import ASKED, unknown_bits_note
from traindiff.analyse.compare.circumstances import (
    SHOW_LOSS_SCALES,
    approximate_in_one_run,
    circumstances,
    coefficient_error,
    not_forced,
    other_dtypes,
    other_models,
    other_reductions,
    reduced_in,
    scale_factors,
    scale_note,
)
from traindiff.analyse.compare.clipping import (
    clip_coefficient,
    clip_factor,
    clipping_findings,
    clipping_note,
    hidden_by_clipping,
)
from traindiff.analyse.compare.configuration import Configurations
from traindiff.analyse.compare.diagnosis import without_guess
from traindiff.analyse.compare.edits import EditsApart
from traindiff.analyse.compare.evaluations import OtherEvaluations, without_gradients
from traindiff.analyse.compare.explanations import (
    batch_statistics_message,
    explained,
    flow,
    other_buffers_message,
    shifted_labels_message,
    surroundings,
    unreached_positions_message,
    unseen_batch_message,
    unseen_contributions_message,
    unseen_labels_message,
    with_each_ranks_own,
    with_names,
)
from traindiff.analyse.compare.judge import OTHER_FORM, BothRuns, Judge
from traindiff.analyse.compare.limits import (
    choices_notes,
    computed_notes,
    hints,
    limits,
    not_followed,
    parted_note,
    rounded_notes,
    unjudged_note,
)
from traindiff.analyse.compare.operator_search import OperatorSearch
from traindiff.analyse.compare.same_so_far import SameSoFar
from traindiff.analyse.compare.step_input import StepInput
from traindiff.analyse.compare.step_judge import judge_step
from traindiff.analyse.compare.turns import Turns
from traindiff.analyse.compare.uncalled import is_uncalled
from traindiff.analyse.compare.verdict import Comparison, Word
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.history import DifferenceHistory
from traindiff.analyse.merge.recorded_calls import clips, contributions, samples_of, size_of_alignments
from traindiff.analyse.merge.run_steps import RunStep
from traindiff.analyse.merge.site import Part, SiteKey, loss_scale, num_micro_steps
from traindiff.analyse.noise.corrections import correction_error, counts_in_float32
from traindiff.analyse.noise.measured import Calibration, StepNoise
from traindiff.analyse.noise.run_floors import is_mixing
from traindiff.analyse.noise.tolerance import Tolerances
from traindiff.analyse.noise.unseen import hidden_activations
from traindiff.analyse.rules import run_facts
from traindiff.analyse.story import representation_note
from traindiff.core.maps.accepted import NONE_ACCEPTED, AcceptedDifferences
from traindiff.core.site import label
from traindiff.core.summary import rounding
from traindiff.core.tap_registry import shows_any
from traindiff.storage import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedStep:
    """One step of two runs, compared: its findings, in execution order.

    Attributes:
        step: Its number.
        aligned: The step; None if it only repeats the one before, and has no findings.
        findings: Its findings.
    """

    step: int
    aligned: AlignedStep | None
    findings: tuple[Finding, ...]


class Noise:
    """The baseline's noise, as far as it is known. This base class knows nothing.

    Attributes:
        calibration: The calibration at the step that is judged.
        earlier: Differences in the evaluations of the loss before the last one, of the step that was asked for last.
    """

    calibration: Calibration = Calibration()
    earlier: Sequence[StepNoise] = ()

    @property
    def operators(self) -> Sequence[Sequence[Part]]:
        """Operators of each noise recording in the step that was asked for last."""
        return ()

    def of_step(self, given: AlignedStep) -> StepNoise | None:  # noqa: ARG002
        """Differences of the replicas from the baseline in a step; None if no replica has it."""
        return None


class RunningComparison:
    """Compares two runs step by step, while their steps arrive.

    Args:
        runs: The two runs.
        tolerance: Tolerance of the user, which replaces the floors.
        identical: Whether the user demands the same bits.
        noise: The baseline's noise, as far as it is known.
        history: Records every difference, if a report will show them.
        accepted: Differences that are listed, and not judged.

    Attributes:
        runs: The two runs.
    """

    def __init__(
        self,
        runs: TwoRuns,
        *,
        tolerance: Tolerances | None = None,
        identical: bool = False,
        noise: Noise | None = None,
        history: DifferenceHistory | None = None,
        accepted: AcceptedDifferences = NONE_ACCEPTED,
    ) -> None:
        self.runs = runs
        self._accepted = accepted
        self._rename = rename = runs.rename
        self._identical = identical
        self._measured = noise or Noise()
        baseline, candidate = runs.runs
        self._facts = (run_facts(baseline), run_facts(candidate, rename))
        self._both = BothRuns(self._facts, [side.common for side in runs.map.sides])
        modules = self._facts[0].modules
        self._leaky = not _LEAKY.isdisjoint(modules.values())
        self._classes = {path: name for path, name in modules.items() if _SUMMING.search(name)}
        self._holders = self._facts[0].holders & self._facts[1].holders
        contents = [[run.rank_content(rank) for rank in run.ranks] for run in runs.runs]
        self._computed_in = max((facts.autocast for facts in self._facts), key=rounding)
        self._configurations = Configurations(contents[0], contents[1], rename, ranks=[run.ranks for run in runs.runs])
        self._forced = bool(candidate.run.get("forced_by"))
        self._history = history
        self._judge = Judge(
            tolerance, forced=self._forced, coefficients=coefficient_error(chain(*contents)),
            approximate=approximate_in_one_run(modules, contents), reduced_in=reduced_in(self._facts),
            history=history, optimizers=[*runs.sides[0].groups],
        )  # fmt: skip
        self._counts_in_float32 = counts_in_float32(chain(*contents))
        self._settings = SettingChanges()
        self._knows_buffers = False  # whether buffers that start with other values may explain the first finding
        self._remarks = ""  # on the first finding, and the evidence for them
        self._evidence: dict[str, Any] = {}
        self._flow: list[tuple[int, str]] = []  # sites of its step, in the order of execution
        self._uncovered: list[int] = []
        self._other_buffers: list[str] = []  # that start with other values
        self._constant_buffers = ConstantBuffers()
        self._other_evaluations = OtherEvaluations()
        self._turns = Turns(runs.runs)
        self._edits = EditsApart(self._facts, forced=self._forced)
        self._notes: dict[str, None] = {}
        self._other_dtypes: dict[tuple[str, str], dict[SiteKey, None]] = {}
        self._operators = OperatorSearch(runs.runs, rename)
        may_wait = noise is None and history is None and not self._forced and not self._counts_in_float32
        self._same = SameSoFar(self._judge) if may_wait else None

    def learn(self, candidate: Run) -> None:
        """Let the rules judge later steps with what the candidate has found out since."""
        self._facts = (self._facts[0], run_facts(candidate, self._rename))
        self._both.learn(self._facts[1])

    def feed(self, baseline: RunStep | None, candidate: RunStep | None) -> ComparedStep | None:
        """Compare one step of both runs (see `TwoRuns.pair`); None if it was not compared."""
        seen = self._seen(baseline, candidate)
        if seen is None:
            if baseline is not None:
                self._judge_waiting()  # it comes before what is remembered
                self._judge.remember(baseline.optimizer, baseline.table.values())
            return None
        assert baseline is not None
        assert candidate is not None
        turns, own = self._turns.findings(baseline, candidate), self._of_one_run(seen)
        if self._same is not None and not (turns or own) and self._same.waits(seen, baseline):
            aligned = None if isinstance(seen, RepeatedStep) else seen
            return ComparedStep(step=seen.step, aligned=aligned, findings=())
        given = self.runs.aligned(seen) if isinstance(seen, RepeatedStep) else seen
        self._judge_waiting()
        findings = self._step(given, turns, own)
        if self._same is not None:
            self._same.judged(given, baseline)
        if baseline.operators or candidate.operators:
            self._search_operators(findings, baseline, candidate)
        return ComparedStep(step=given.step, aligned=given, findings=tuple(findings))

    def _seen(self, baseline: RunStep | None, candidate: RunStep | None) -> AlignedStep | RepeatedStep | None:
        """A step of both runs; None if only one has it. It is aligned if it does not only repeat the one before."""
        if self._same is None:
            return self.runs.pair(baseline, candidate)
        if (repeated := self.runs.again(baseline, candidate)) is not None:
            return repeated
        self._same.align(self.runs)
        return self.runs.pair(baseline, candidate)

    def _judge_waiting(self) -> None:
        """Judge the latest of the steps that wait, for all of them."""
        if self._same is not None and (given := self._same.taken(self.runs)) is not None:
            self._step(given, (), ())
            self._same.count(given.step)

    def result(self) -> Comparison:
        """The comparison of the steps so far."""
        self._judge_waiting()
        of_one_run = chain.from_iterable(steps for side in self.runs.alone for steps in side.values())
        self._configurations.note_span(self.runs.compared, of_one_run)
        baseline, candidate = self.runs.runs
        calibration = self._measured.calibration
        rows = self._judge.sites.rows()
        left = without_accepted(self._accepted, self._judge.findings, self.runs.presence.sides(), rows)
        alone = left.alone
        losses = [any(one.phase == "loss" for one in side) for side in alone]
        self._judge.loss_of_one_run = losses[0] != losses[1]
        self._judge.regrouped = self.runs.uneven.calls.keys()
        notes, incomplete = limits(
            self.runs,
            alone,
            learning_agrees=self._judge.learning_agrees and not self._identical,
            gradients_agree=self._judge.gradients_agree and not self._identical,
            learning_compared=self._judge.learning_compared and not self._identical,
            same_bits=self._judge.observed_bits_agree,
        )
        notes = [
            *([ASKED] if self._identical and not self._judge.all_equal else ()),
            *calibration.notes(uncovered=self._uncovered),
            *notes,
            *self._further_notes(),
            *self._other_evaluations.notes(),
            *left.notes,
            *filter(None, [left.follows]),
        ]
        findings, representation = self._explained(left.findings), ()
        if self._judge.only_representation_differs:
            findings, representation = (), findings
            notes.insert(0, representation_note(representation))
        return Comparison(
            baseline=baseline.path,
            candidate=candidate.path,
            verdict=self._word(findings, incomplete=incomplete or bool(self._other_evaluations.steps or left.follows)),
            calibrated=calibration.is_known and not (self._uncovered or calibration.is_partial),
            noise=calibration.to_json(),
            findings=findings,
            representation=representation,
            unaligned=alone,
            steps=self._steps(findings),
            notes=tuple(notes),
            differences=rows,
            accepted_sites=left.accepted,
            ignored_sites=left.ignored,
            history=self._history,
            zooms=tuple(self._operators.found),
            first_bit_difference=self._judge.first_bit_difference,
        )

    def _steps(self, findings: Sequence[Finding]) -> tuple[int, ...]:
        """The compared steps; one that neither run finished counts if it has a finding, or if there is no other."""
        compared = tuple(dict.fromkeys(self.runs.compared))
        counted = self.runs.finished.union(one.step for one in findings)
        return tuple(step for step in compared if step in counted) or compared

    def _search_operators(self, findings: Sequence[Finding], baseline: RunStep, candidate: RunStep) -> None:
        for number in dict.fromkeys(one.evaluation for one in findings):
            runs = (baseline.operators, candidate.operators, *self._measured.operators)
            own, other, *noise = ([part for part in run if number in (None, part[0].evaluation)] for run in runs)
            self._operators.see([one for one in findings if one.evaluation == number], (own, other), noise)

    def _step(self, given: AlignedStep, turns: Sequence[Finding], own: Sequence[Finding]) -> list[Finding]:
        self._judge.run.mixing = self._judge.run.mixing or is_mixing(given.tables[0])
        self._judge.run.corrections = correction_error(given.tables[0], self._counts_in_float32)
        last = self._noise(given)
        noise = dict(enumerate(self._measured.earlier if given.recorded[0].earlier else ()))
        # What is of the whole step, and was before its first forward pass, comes first.
        extra = [*turns, *self._settings.findings(self.runs.sides, given.tables, step=given.step)]
        extra += self._edits.findings(given, own)
        first = (*given.earlier, given)[0]
        begins = [min((e.order for k, e in one.items() if k.phase == "batch"), default=0) for one in first.tables]
        extra += [one for one in own if one.order < begins[_is_of_candidate(one)]]
        extra += without_gradients(given)
        searches = any(side.earlier for side in given.recorded) and are_replayed(given.recorded)
        found = []
        for one in (*given.earlier, given):
            if one is given:
                extra += [finding for finding in own if finding.order >= begins[_is_of_candidate(finding)]]
            of_one = noise.get(one.evaluation or 0, last) if noise else last
            found += self._evaluation(one, of_one, extra, whole=one is given, searches=searches)
            extra = []
        same_bits = self._judge.all_equal and not self._judge.findings
        others = self._other_evaluations.see(given, same_bits=same_bits)
        self._judge.add(others)
        return [*found, *others]

    def _of_one_run(self, given: AlignedStep | RepeatedStep) -> list[Finding]:
        """Faults that only one run has; each run is judged with its own tensors, before a map joins any."""
        if isinstance(given, RepeatedStep):  # there is no map
            tables, same, first = list(given.tables), True, []
        else:
            sides = zip(given.sides, given.tables, strict=True)
            tables, same = [own.own.table if own.unmapped else table for own, table in sides], given.same
            first = [(*own.earlier, own)[0].own.table for own in given.recorded]
        return [
            with_names(one, self.runs.copies[RUNS.index(one.evidence["run"])], self._rename)
            for one in self._both.findings(tables, first, step=given.step, same=same)
        ]

    def _evaluation(
        self, given: AlignedStep, noise: StepNoise | None, extra: Sequence[Finding], *, whole: bool, searches: bool
    ) -> list[Finding]:
        """Judge one evaluation of a step, with further findings.

        Args:
            given: The evaluation.
            noise: Differences of replicas in it.
            extra: Further findings.
            whole: It is the last one, with all that is of the whole step.
            searches: The step has several, and both runs have replayed what the optimizer did in it.
        """
        step, tables, pairs = given.step, given.tables, given.pairs
        before = steps_before(self.runs.runs, step, pairs) if given.first else 0
        self._configurations.see(tables, step=step)
        for pair in pairs:
            if pair.baseline.dtype != pair.candidate.dtype:
                dtypes = (pair.baseline.dtype, pair.candidate.dtype)
                self._other_dtypes.setdefault(dtypes, {}).setdefault(pair.baseline.key, None)
        if given.first:
            self._other_buffers = other_buffers(pairs)
        changed = self._constant_buffers.changed(pairs)
        clipped = (clips(tables[0]), clips(tables[1]))
        scales = (loss_scale(tables[0]), loss_scale(tables[1]))
        found = [*given.findings, *extra]
        if all(shows_any(one.observed, SHOW_LOSS_SCALES) for one in self._facts) and (note := scale_note(*scales)):
            self._notes.setdefault(note)
        if all(one.observes("grad") for one in self._facts):
            found += clipping_findings(*clipped, pairs, step=step)
            if note := clipping_note(*clipped, pairs):
                self._notes.setdefault(note)
        micro_steps = [num_micro_steps(table) for table in tables]
        ranks = max(side.data_parallel for side in self.runs.sides)
        if not self._judge.findings:
            found += hidden_by_clipping(*clipped, step=step, micro_steps=micro_steps[1], ranks=ranks)
        place = in_baseline_order(given.aligned.pairs)
        found = [replace(one, order=place(one.order)) if _is_of_candidate(one) else one for one in found]
        found += check_random_state(*tables, step=step)
        if not self._forced:  # in a forced run no operation computes it
            pairs = [*pairs, *gradient_norms(pairs)]
        known = self._judge.first_site
        found = judge_step(
            self._judge,
            StepInput(
                step=step,
                optimizer=given.baseline.optimizer,
                first=given.first,
                steps_before=before,
                drift=drift(given.parameters.values(), before),
                alignments=size_of_alignments(tables),
                searches=searches,
                pairs=tuple(sorted(pairs, key=lambda pair: pair.baseline.order)),
                found=tuple(found),
                contributions=contributions(tables[1]),
                expected=contributions(tables[0]),
                parameters=given.parameters,
                parameters_known=given.parameters_known,
                micro_steps=micro_steps[1],
                most_micro_steps=max(micro_steps),
                ranks=ranks,
                samples=max((int(e.summary["count"]) for k, e in tables[0].items() if k.phase == "batch"), default=1),
                batches=(samples_of(tables[0]), samples_of(tables[1])),
                noise=noise,
                calibration=self._measured.calibration,
                every_bit=ASKED if self._identical else "" if noise is None else self._measured.calibration.every_bit,
                factors=tuple(scale_factors(*scales)),
                clipped=tuple(clip_factor(*clipped)),
                coefficients=(clip_coefficient(clipped[0]), clip_coefficient(clipped[1])),
                clip=max((one.coefficient for one in clipped[0]), default=1.0) or 1.0,
                clips=any(clipped),
                clips_in_one=any(clipped) and not all(clipped),
                evaluation=given.evaluation,
                whole=whole,
                carried=clip_coefficient(clipped[0]) / scales[1],
                leaky=self._leaky,
                classes=self._classes,
                holders=self._holders,
                unplaced=given.unplaced,
                unpaired=(*given.aligned.only_baseline, *given.aligned.only_candidate),
                hidden=hidden_activations(given.aligned, place),
                computed_in=self._computed_in,
                other_form=given.other_form,
                calls=given.calls,
                sources=given.sources,
            ),
        )
        if self._judge.first_site not in (None, known):
            first = self._judge.findings[0]
            self._flow = [(one.order, label(one.key.path, one.key.slot)) for one in flow(pairs)]
            hop, self._evidence = surroundings(first, pairs, given.aligned, other_form=given.other_form)
            divided = (micro_steps[0], micro_steps[1])
            recorded = [side.table for side in given.sides]
            statistics = batch_statistics_message(first, self._facts[0].modules, recorded, divided)
            batch = unseen_batch_message(first, recorded)
            labels = unreached_positions_message(first, pairs) or batch or unseen_labels_message(first, pairs)
            shifted = shifted_labels_message(first, pairs)
            unseen = unseen_contributions_message(first, pairs, max(micro_steps), recorded)
            buffers = other_buffers_message(first, self._other_buffers, () if statistics else changed)
            self._knows_buffers = bool(buffers)
            self._remarks = statistics + shifted + labels + unseen + buffers + hop
        return found

    def _noise(self, given: AlignedStep) -> StepNoise | None:
        noise = self._measured.of_step(given)
        if noise is None and self._measured.calibration.is_known:
            self._uncovered.append(given.step)
        return noise

    def _explained(self, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        """The findings; the first with remarks on its surroundings and causes."""
        if not findings:
            return ()
        first, *rest = findings
        if first is not self._judge.findings[0]:  # what surrounds the accepted one says nothing of this one
            return tuple(map(self._configured, findings))
        evidence = {**first.evidence, **self._evidence}
        form = next((one.message for one in rest if one.evidence.get(OTHER_FORM)), "")
        remarks = self._remarks + self.runs.uneven.remark(first, form)
        first = without_guess(first) if self._knows_buffers else first
        first = replace(first, message=first.message + remarks, evidence=evidence)
        sizes = (self.runs.sides[0].data_parallel, self.runs.sides[1].data_parallel)
        first = with_each_ranks_own(first, self._facts[sizes.index(max(sizes))].modules, sizes)
        first = self._operators.told(explained(first, *(run.run for run in self.runs.runs)))
        first = self._configurations.surrounded(first, self.runs.uneven.unseen)
        late = self._evidence.get("one_hop_late", ())
        uncalled = [one for one in rest if is_uncalled(one) and label(one.path, one.slot) in late]
        rest = [one for one in rest if one not in uncalled]
        first, *told = map(self._configured, (first, *uncalled, *rest))
        if first.evidence.get("settings") and first.message.startswith(f"{first.path}: "):  # the cause is known
            return (first, *told)
        return (*told[: len(uncalled)], first, *told[len(uncalled) :])

    def _configured(self, finding: Finding) -> Finding:
        """The finding, with the settings that explain it."""
        before, first = "", self._judge.findings[0]
        if finding.phase == "backward" and finding.step == first.step and "after" not in finding.evidence:
            place = bisect_left(self._flow, finding.order, key=lambda one: one[0])
            before = self._flow[place - 1][1] if place else ""
        return self._configurations.explained(finding, before)

    def _further_notes(self) -> list[str]:
        """Notes that belong to every verdict."""
        baseline, candidate = self.runs.runs
        notes = [
            *self._both.shared.values(),
            *self._both.unknown,
            *hints(self.runs),
            *not_followed(self.runs),
            *self.runs.uneven.notes(),
        ]
        notes += choices_notes(self._judge.turned, self._judge.choices)
        judge = self._judge
        unjudged = unjudged_note(judge.unjudged, is_represented_otherwise=judge.only_representation_differs)
        unknown = [key for key in judge.unknown_bits if not self.runs.map.joins(key.path)]
        parted = parted_note(judge.parted)
        notes += [*computed_notes(judge.computed), *rounded_notes(judge.rounded)]
        notes += filter(None, (unjudged, parted, unknown_bits_note(unknown)))
        if self._judge.nan_in_both:
            notes.append(f"NaN at the same places in both runs, first at {self._judge.nan_in_both[0]}.")
        notes += [f"--rename {rule} changes no path of the candidate." for rule in self._rename.unused]
        notes += [*filter(None, [self.runs.singletons.note(), self.runs.map.note()]), *self.runs.map.notes]
        notes += other_models(*self.runs.sides)
        notes += other_dtypes(self._other_dtypes)
        notes += other_reductions(self._facts)
        notes += self._notes
        notes += self._operators.notes
        notes += self._configurations.notes()
        notes += not_forced([candidate.rank_content(rank) for rank in candidate.ranks])
        return [*notes, *circumstances(baseline.run, candidate.run)]

    def _word(self, findings: Sequence[Finding], *, incomplete: bool) -> Word:
        if findings:
            return "misaligned" if findings[0].kind in EXACT_KINDS else "diverged"
        if incomplete or (self._identical and self._judge.unknown_bits):
            return "incomplete"
        uneven = self.runs.uneven
        in_parts = self.runs.map.is_unplaced or self.runs.singletons.sites or uneven.padded or uneven.computed
        equal = self._judge.all_equal and not self._judge.findings and not in_parts
        return "identical" if equal else "equivalent"


_SUMMING = re.compile("(Batch|Instance|Group|RMS)Norm|Embedding")
"""Modules whose kernels are known to sum in their own ways: norms, most of them over the positions of an image or a
sequence, and embeddings."""

_LEAKY = frozenset({"LeakyReLU", "PReLU", "RReLU"})
"""Modules with gates that leave no zeros when they shut."""


def _is_of_candidate(finding: Finding) -> bool:
    """True if the order of a finding is a place in the candidate's execution order."""
    return finding.kind in ("extra", "recomputed") or finding.evidence.get("run") == "candidate"
