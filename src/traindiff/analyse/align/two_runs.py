"""Two runs, step by step, with what both have brought together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_

from traindiff.analyse.align.continuation import with_beginning
from traindiff.analyse.align.earlier_passes import without_earlier_passes
from traindiff.analyse.align.micro_losses import with_added_losses, with_combined_losses, with_summed_passes
from traindiff.analyse.align.other_moments import OtherMoments
from traindiff.analyse.align.pairs import Aligned, Presence, align
from traindiff.analyse.align.returned_states import ReturnedStates, Sources
from traindiff.analyse.align.side import (
    Side,
    SideStep,
    Tables,
    join,
    sites_in_order,
    with_gradient_stages,
    without_earlier,
)
from traindiff.analyse.align.singleton_dims import SingletonDims
from traindiff.analyse.align.site_map import SiteMap
from traindiff.analyse.align.slot_names import with_common_slots
from traindiff.analyse.align.uneven import Unplaced
from traindiff.analyse.align.used_passes import UsedPasses
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.parameters import copies_elsewhere, ties_of
from traindiff.analyse.merge.renames import Renaming
from traindiff.analyse.merge.run_steps import RunStep
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable, num_micro_steps
from traindiff.analyse.merge.unobserved import FailedTaps, without_lost
from traindiff.core.maps.entries import Entry
from traindiff.core.observation import BEFORE, REPLAYED, is_of_evaluation
from traindiff.core.steps import StepSelection
from traindiff.storage import Run, ShiftedRecording

_PHASES = ("grad", "optimizer", "update", "param")


def _begun_with(one: SideStep, found: Mapping[str, MergedSite], side: Side) -> dict[str, MergedSite]:
    """What a run begins with: what the first step of all optimizers found, and this step of the first one found else.

    What no optimizer holds is recorded with the steps of the first one alone.
    """
    held = {path: entry for path, entry in found.items() if path in side.held}
    return held | {path: entry for path, entry in one.before.items() if path not in side.held}


def without_unplaced(table: StepTable, other: StepTable) -> dict[SiteKey, MergedSite]:
    """The table without parameters whose ranks differ and whose shape is another one in the other run."""
    apart = (
        entry for entry in table.values() if entry.apart and entry.key.phase != "update"
    )  # ranks replay different ranges
    paths = {entry.key.path for entry in apart if _differs_in_shape(entry, other)}
    return {
        key: _unknown(entry, other[key]) if key.path in paths and _differs_in_shape(entry, other) else entry
        for key, entry in table.items()
    }


def _differs_in_shape(entry: MergedSite, other: StepTable) -> bool:
    there = other.get(entry.key)
    return entry.key.phase in _PHASES and there is not None and there.shape != entry.shape


def _unknown(entry: MergedSite, other: MergedSite) -> MergedSite:
    reason = (
        f"ranks hold different values of shape {list(entry.shape)}, and in the other run it is {list(other.shape)}: "
        f'declare which part each has with record(shards=[traindiff.shard("{entry.key.path}", dim=..., axis=...)])'
    )
    return replace(entry, unobserved=reason, apart=())


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedStep:
    """One step that both runs have.

    Attributes:
        step: Its number.
        first: Whether it is the first that is compared, or the first one of the optimizer with whose steps initial
            parameters are recorded: others may step before it.
        baseline: The baseline's step, as it was recorded.
        sides: The step in each run.
        tables: The same, without what cannot be compared.
        aligned: Sites of both runs, and sites of one run only.
        pairs: Sites of both runs that can be measured.
        findings: Sites that one run lacks and should have.
        recorded: The step in each run, with all its evaluations of the loss.
        evaluation: Number of the evaluation of the loss; None in a step with one.
        unplaced: The baseline's entries of sites whose rows could not be brought together, in execution order.
        other_form: Whether both runs were given the same samples, padded or ordered otherwise.
        earlier: The evaluations before this one, which are compared first.
        sources: Inputs of each run that are its own outputs, as `ReturnedStates.sources`.
        same: Whether both tables hold the same entries, to the last bit.
        calls: By module that the runs have called on other parts of the batch so far: the most calls in a step.
        parameters_known: False if the runs may know `parameters` from different moments of the training.
    """

    step: int
    first: bool
    baseline: RunStep
    sides: tuple[SideStep, SideStep]
    tables: Tables
    aligned: Aligned
    pairs: list[Pair]
    findings: list[Finding]
    recorded: tuple[SideStep, SideStep]
    evaluation: int | None = None
    unplaced: tuple[MergedSite, ...] = ()
    other_form: bool = False
    earlier: tuple[AlignedStep, ...] = ()
    sources: Sources = ({}, {})
    same: bool = False
    calls: Mapping[str, int] = field(default_factory=dict)
    parameters_known: bool = True

    @property
    def parameters(self) -> dict[str, Pair]:
        """By path: the parameters as the step found them, on both sides."""
        baseline, candidate = (side.before for side in self.sides)
        return {
            path: Pair(baseline=entry, candidate=candidate[path])
            for path, entry in baseline.items()
            if path in candidate and candidate[path].shape == entry.shape
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedStep:
    """A step of which both runs recorded the same bits, with the sites of the step before, of which that is true, too.

    It is the same in both runs, and is aligned only if it is judged; see `TwoRuns.aligned`.

    Attributes:
        step: Its number.
        steps: The step in each run, as it was recorded.
        side: The step in the baseline.
        table: Its sites, with updates.
        sources: Inputs that are the run's own outputs, as `ReturnedStates.sources`.
    """

    step: int
    steps: tuple[RunStep, RunStep]
    side: SideStep
    table: dict[SiteKey, MergedSite]
    sources: Mapping[tuple[str, str], str]

    @property
    def tables(self) -> Tables:
        """Its sites in each run."""
        return self.table, self.table


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repeatable:
    """What a step must have to repeat the one before: how it was merged, its sites, and which have no numbers, and why.

    Attributes:
        layout: As `RunStep.layout`.
        sites: The sites, in order.
        unobserved: Reasons by site.
    """

    layout: object
    sites: list[SiteKey]
    unobserved: dict[SiteKey, str]


def _unobserved(table: StepTable) -> dict[SiteKey, str]:
    return {key: entry.unobserved for key, entry in table.items() if entry.unobserved}


def _are_same(tables: Tables) -> bool:
    """True if two tables hold the same entries: those that were merged once for both runs, and equal updates."""
    baseline, candidate = tables
    return len(baseline) == len(candidate) and all(map(_is_same, baseline.values(), candidate.values()))


def _is_same(one: MergedSite, other: MergedSite) -> bool:
    if one is other:
        return one.placed
    derived = one.key == other.key and one.key.phase == "update" and bool(one.origin)
    return derived and one.origin == other.origin and one.summary.tobytes() == other.summary.tobytes()


def _evaluation(side: SideStep, number: int) -> SideStep:
    """One evaluation of the loss in a step, with the settings of the optimizers.

    The other run evaluates the loss more often, or less often, so the rest of the step has no counterpart.
    """
    one = (*side.earlier, side)[number]
    table = {key: entry for key, entry in one.table.items() if is_of_evaluation(key.phase, key.stage)}
    table.update((key, entry) for key, entry in side.table.items() if key.group)
    return replace(one, table=table, updates=(), earlier=())


def are_replayed(sides: tuple[SideStep, SideStep]) -> bool:
    """True if both runs have computed the update of a step a second time, so that each is judged by itself."""
    return all(any(key.phase == "update" and key.stage == REPLAYED for key in side.table) for side in sides)


def _without_moves(sides: tuple[SideStep, SideStep]) -> tuple[SideStep, SideStep]:
    """An evaluation of the loss, without how far the optimizer moves to the next one.

    A search that ends after another number of evaluations has branched where rounding decides. How far it moves may
    differ by any amount from there on; its replay judges it in each run.
    """
    return replace(sides[0], updates=()), replace(sides[1], updates=())


class TwoRuns:
    """Brings together the steps of two runs; call `pair` with one step after the other.

    Args:
        runs: Baseline and candidate.
        rename: Turns the candidate's paths into the baseline's.
        selection: Steps to compare.
        entries: Of a map: which sites are one.

    Attributes:
        runs: Baseline and candidate.
        map: Which of their sites are one.
        rename: Turns the candidate's paths into the baseline's, as the map and the rules say.
        sides: The two runs, with what they hold.
        presence: Sites without a counterpart so far.
        failed: Gaps of each run.
        copies: Parameters that ranks of each run have under other names.
        compared: Numbers of the steps that both runs have, so far.
        finished: Those of them in which at least one run called the optimizer.
        stepped: Whether an optimizer was called in one of these.
        moments: Which parameters the runs know from different moments of the training.
        alone: By run and optimizer: selected steps that only one run has.
        latest: By optimizer: the last step that was compared.
        uneven: Sites whose rows could not be brought together.
        passes: Passes that were left out of steps in which only one run has them.
        singletons: Activations whose shapes differ in dims of length 1.
        earlier: Run and step of passes that were left out, because the other run began after them; None for none.
        unheld: Parameters that no optimizer holds, and whose values at the beginning were not compared for that.
        behind: By run and rank: the first step that the rank lacks although its run has it.

    Raises:
        ConfigError: Two of the candidate's paths get one name.
    """

    def __init__(
        self, runs: tuple[Run, Run], rename: Renaming, selection: StepSelection, entries: Sequence[Entry] = ()
    ) -> None:
        baseline, candidate = runs
        self.runs = runs
        self.map = SiteMap(entries, runs, rename)
        self.rename = rename = self.map.rename
        self.sides = (Side(baseline, names=self.map.sides[0]), Side(candidate, rename, self.map.sides[1]))
        self.presence = Presence(self.sides)
        self.copies = (
            copies_elsewhere(baseline, ties_of(candidate, rename)),
            copies_elsewhere(candidate, ties_of(baseline), rename),
        )
        self.failed = (FailedTaps(), FailedTaps())
        self.compared: list[int] = []
        self.finished: set[int] = set()
        self.stepped = False
        self.alone: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})
        self.latest: dict[str, int] = {}
        self.earlier: tuple[int, int] | None = None
        self.unheld: tuple[str, ...] = ()
        self._has_begun = False  # whether a step of the first optimizer was compared
        self._found: tuple[Mapping[str, MergedSite], ...] = ()  # what the first step that was compared found, by run
        self.behind: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._selection = selection
        modules = [run.rank_content(rank).get("modules", {}) for run in runs for rank in run.ranks]
        self.uneven = Unplaced(classes={name for one in modules for name in one.values()})
        self.passes = UsedPasses(rename)
        self.singletons = SingletonDims()
        self.moments = OtherMoments(self.sides)
        self._states = (ReturnedStates(), ReturnedStates())
        self._repeatable: _Repeatable | None = None  # the step before, if the next one may repeat it
        self._is_ahead = False  # whether the baseline knows steps that the candidate does not know yet

    def pair(self, baseline: RunStep | None, candidate: RunStep | None) -> AlignedStep | None:
        """Bring together one step of both runs. Steps must be given in order: later ones follow from earlier ones.

        Args:
            baseline: The baseline's step; None if only the candidate has it.
            candidate: The candidate's step; None if only the baseline has it.

        Returns:
            The step; None if only one run has it, or it is not selected.
        """
        if baseline is not None and candidate is not None:
            return self._both(baseline, candidate)
        self._go_on()
        for side, alone in enumerate((baseline, candidate)):
            if alone is not None:
                self._one(side, alone)
        return None

    def again(self, baseline: RunStep | None, candidate: RunStep | None) -> RepeatedStep | None:
        """A step of both runs that repeats the one before; None if it must be given to `pair`, which was not done yet.

        Args:
            baseline: As for `pair`.
            candidate: As for `pair`.
        """
        if baseline is None or candidate is None or not self._repeats(baseline, candidate):
            return None
        side = self.sides[0].step(baseline, first=False)
        self._states[0].see([side.table])
        self._is_ahead = True
        self._note(baseline, candidate)
        updates = ((entry.key, entry) for entry in side.updates)
        return RepeatedStep(
            step=baseline.step, steps=(baseline, candidate), side=side, table={**side.table, **dict(updates)},
            sources=dict(self._states[0].sources),
        )  # fmt: skip

    def aligned(self, repeated: RepeatedStep) -> AlignedStep:
        """A step that repeats the one before, aligned. It must be the latest one."""
        sides = repeated.side, self.sides[1].like(repeated.side)
        given = self._aligned(sides, repeated.steps, evaluation=None)
        return replace(given, sources=(repeated.sources, repeated.sources))

    def _repeats(self, baseline: RunStep, candidate: RunStep) -> bool:
        """True if a step has the sites of the one before, and the same bits in both runs."""
        like, tables = self._repeatable, (baseline.table, candidate.table)
        if like is None or baseline.layout is not like.layout or baseline.step not in self._selection:
            return False
        if any(one.earlier or one.without_idle or one.missing for one in (baseline, candidate)):
            return False
        if len(tables[0]) != len(tables[1]) or not all(map(is_, tables[0].values(), tables[1].values())):
            return False
        return list(tables[0]) == like.sites and _unobserved(tables[0]) == like.unobserved

    def _go_on(self) -> None:
        """End a row of steps that repeat the one before: the candidate knows what the baseline does."""
        if self._is_ahead and self._repeatable is not None:
            self.sides[1].follow(self.sides[0], self._repeatable.sites)
            self._states[1].follow(self._states[0])
        self._is_ahead, self._repeatable = False, None

    def _note(self, baseline: RunStep, candidate: RunStep) -> None:
        """Note a step that is compared."""
        self.compared.append(baseline.step)
        self.latest[baseline.optimizer] = baseline.step
        if baseline.finished or candidate.finished:
            self.finished.add(baseline.step)
        self.stepped |= baseline.finished and candidate.finished

    def _one(self, side: int, step: RunStep) -> None:
        self.sides[side].step(step)  # later updates need it
        if step.finished and not step.unseen and step.step in self._selection:
            self.alone[side].setdefault(step.optimizer, []).append(step.step)

    def _both(self, baseline: RunStep, candidate: RunStep) -> AlignedStep | None:
        self._go_on()
        recorded = baseline
        baseline, candidate = steps = self.passes.in_common(*self._from_one_place(baseline, candidate))
        first = not self.compared
        sides = self._in_each_run(baseline, candidate, first=first)
        for states, one in zip(self._states, sides, strict=True):
            states.see([part.table for part in (*one.earlier, one)])
        self.failed[0].see(sides[0].table, sides[1].table, step=baseline.step)
        self.failed[1].see(sides[1].table, sides[0].table, step=candidate.step)
        if baseline.step not in self._selection:
            return None
        self._note(baseline, candidate)
        if baseline.missing != candidate.missing:
            for behind, run, step in zip(self.behind, self.runs, steps, strict=True):
                for rank in [rank for rank in step.missing if rank in run.ranks]:
                    behind.setdefault(rank, step.step)
        for number, (side, step) in enumerate(zip(self.sides, steps, strict=True)):
            if step.missing and side.is_pipeline:
                self.presence.lack_stages.add(number)
        count = min(len(side.earlier) for side in sides)
        alike = len(sides[0].earlier) == len(sides[1].earlier)
        judged = alike or not are_replayed(sides)
        earlier = tuple(
            self._aligned(both if judged else _without_moves(both), steps, evaluation=number)
            for number, both in enumerate(zip(sides[0].earlier[:count], sides[1].earlier[:count], strict=True))
        )
        if alike:
            last = self._aligned(sides, steps, evaluation=count if count else None)
        else:
            last = self._aligned((_evaluation(sides[0], count), _evaluation(sides[1], count)), steps, evaluation=count)
        if (
            last.same
            and not (earlier or first or self.failed[0].lost or self.failed[1].lost)
            and recorded.layout is not None
        ):
            self._repeatable = _Repeatable(
                layout=recorded.layout, sites=list(recorded.table), unobserved=_unobserved(recorded.table)
            )
        return replace(last, earlier=earlier, recorded=sides)

    def _begin(self, baseline: RunStep, candidate: RunStep) -> list[bool]:
        """For each run, whether it begins with its step, or goes on from the middle of the other run."""
        if isinstance(self.runs[1], ShiftedRecording) and (offset := self.runs[1].offset):
            return [offset < 0, offset > 0]
        steps = baseline, candidate
        return [run.run.get("first_step") == step.step for run, step in zip(self.runs, steps, strict=True)]

    def _known(self, one: SideStep, run: int, step: RunStep) -> SideStep:
        """A step without parameters as it found them, if steps of other optimizers before it were not read yet.

        Nor is known what no optimizer holds, if passes were left out after which it may have changed.
        """
        late = {
            path for name, number in step.after.items() if name != step.optimizer
            for group in self.sides[run].groups.get(name, ()) for path in group
            if one.found_after.get(path, -1) < number
        }  # fmt: skip
        if self.earlier is not None and self.earlier[0] == run:
            unheld = one.before.keys() - self.sides[run].held
            self.unheld = tuple(sorted(unheld))
            late |= unheld
        return replace(one, before={path: entry for path, entry in one.before.items() if path not in late})

    def _from_one_place(self, baseline: RunStep, candidate: RunStep) -> tuple[RunStep, RunStep]:
        """The first step of both runs, without passes that one of them made before the other one began."""
        steps, begins = [baseline, candidate], self._begin(baseline, candidate)
        if not self.compared and begins[0] != begins[1]:
            longer, shorter = begins.index(False), begins.index(True)
            renames = (str, self.rename)
            rest = without_earlier_passes(steps[longer], steps[shorter], (renames[longer], renames[shorter]))
            if rest is not None:
                self.earlier = longer, baseline.step
                # What no optimizer holds, such as an average, may have changed after those passes.
                rename, held = renames[longer], self.sides[longer].held
                unheld = {key for key in rest.table if key[:2] == ("param", BEFORE) and rename(key.path) not in held}
                steps[longer] = replace(
                    rest, table={key: entry for key, entry in rest.table.items() if key not in unheld}
                )
        return steps[0], steps[1]

    def _in_each_run(self, baseline: RunStep, candidate: RunStep, *, first: bool) -> tuple[SideStep, SideStep]:
        """The step in each run; evaluations of the loss before the last one only if both runs show their number."""
        sides = self.sides[0].step(baseline, first=first), self.sides[1].step(candidate, first=first)
        if all(side.shows_evaluations for side in self.sides):
            return sides
        return without_earlier(sides[0]), without_earlier(sides[1])

    def _aligned(
        self, sides: tuple[SideStep, SideStep], steps: tuple[RunStep, RunStep], *, evaluation: int | None
    ) -> AlignedStep:
        """One evaluation of a step of both runs; with the last one goes everything else of the step."""
        first_of_main = not self._has_begun and steps[0].optimizer == self.sides[0].main
        first = not evaluation and (first_of_main or len(self.compared) == 1)
        self._has_begun = self._has_begun or first_of_main
        if first:
            begins = self._begin(*steps)
            known = self._known(sides[0], 0, steps[0]), self._known(sides[1], 1, steps[1])
            self._found = self._found or (known[0].before, known[1].before)
            found = list(map(_begun_with, known, self._found, self.sides))
            trained = [side.trained for side in self.sides]
            sides = (
                with_beginning(known[0], found[0], sides[1], trained[1], begins=begins == [False, True]),
                with_beginning(known[1], found[1], sides[0], trained[0], begins=begins == [True, False]),
            )
        sides = self.moments.without(sides)
        tables = self.singletons.without(with_common_slots(join(sides)))
        unmapped = not any(side.unmapped for side in sides)
        same = unmapped and steps[0].missing == steps[1].missing and _are_same(tables)
        if same:  # nothing is divided otherwise
            self.uneven.begin()
            tables = self._without_lost(tables)
        else:
            tables = self.uneven.comparable(with_summed_passes(self._comparable(tables, steps)))
            if self.uneven.scalars or num_micro_steps(tables[0]) != num_micro_steps(tables[1]):
                tables = with_combined_losses(tables)
            tables = with_added_losses(tables)
        aligned = align(*map(sites_in_order, tables))
        pairs, findings = self.presence.judge(aligned, step=steps[0].step)
        return AlignedStep(
            step=steps[0].step, first=first, baseline=steps[0], sides=sides,
            tables=tables, aligned=aligned, pairs=pairs, findings=findings, evaluation=evaluation, recorded=sides,
            unplaced=self.uneven.latest, other_form=self.uneven.other_form, same=same,
            sources=(self._states[0].sources, self._states[1].sources), calls=dict(self.uneven.calls),
            parameters_known=not self.moments.shared,
        )  # fmt: skip

    def _without_lost(self, tables: Tables) -> Tables:
        lost = (*self.failed[0].lost, *self.failed[1].lost)
        return without_lost(tables[0], lost), without_lost(tables[1], lost)

    def _comparable(self, tables: Tables, steps: tuple[RunStep, RunStep]) -> Tables:
        """The tables with derived gradient stages, and without what is unknown in one of them."""
        own, other = (
            with_gradient_stages(own, other, asked="grad.stages" in side.recorded)
            for side, own, other in zip(self.sides, tables, tables[::-1], strict=True)
        )
        baseline, candidate = self._without_lost((own, other))
        baseline, candidate = without_unplaced(baseline, candidate), without_unplaced(candidate, baseline)
        if steps[0].missing == steps[1].missing:
            return baseline, candidate  # both runs lack the same ranks, so the rest is comparable
        return self.sides[0].without_missing(baseline, steps[0]), self.sides[1].without_missing(candidate, steps[1])
