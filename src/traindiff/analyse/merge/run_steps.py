"""One run step by step, merged over its ranks, with one step of all of them in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from traindiff.analyse.merge.idle_passes import Rest, without_idle
from traindiff.analyse.merge.merged_tables import MergedTables
from traindiff.analyse.merge.parameters import NO_COPIES, Copies, group_numbers, group_paths, under_one_name
from traindiff.analyse.merge.rank_codes import num_bits
from traindiff.analyse.merge.rank_steps import rank_steps
from traindiff.analyse.merge.shared_steps import SharedSteps
from traindiff.analyse.merge.site import MergedSite, Part, SiteKey
from traindiff.analyse.merge.span import WHOLE_RUN, Span
from traindiff.analyse.merge.step_table import step_table
from traindiff.analyse.merge.table_plan import TablePlan, plan_of
from traindiff.core.observation import (
    BEFORE,
    CARRIED,
    ITSELF,
    MAYBE_UNSEEN,
    OPERATOR_STAGES,
    PRODUCT_STAGES,
    UNSEEN,
    Observation,
    is_of_evaluation,
)
from traindiff.core.summary import nonfinite_count
from traindiff.errors import RecordingError
from traindiff.storage import Joined, Recording, Run, StepObservations, ended, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An evaluation of the loss that is not the last one of its step.

    Attributes:
        table: Its sites: the batch, activations, losses and gradients.
        moved: The parameters as the next evaluation found them, by path; those that were recorded.
    """

    table: dict[SiteKey, MergedSite]
    moved: dict[str, MergedSite]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContent:
    """What is merged of a step; see `RunStep`."""

    table: dict[SiteKey, MergedSite]
    earlier: list[Evaluation] = field(default_factory=list)
    operators: list[Part] = field(default_factory=list)
    products: list[Part] = field(default_factory=list)
    without_idle: tuple[list[Evaluation], dict[SiteKey, MergedSite]] | None = None
    layout: object = None
    finite: bool = False

    def again(self) -> StepContent:
        """The same for the other run, which releases it by itself."""
        idle = self.without_idle
        return replace(
            self, table=dict(self.table), earlier=list(self.earlier), operators=list(self.operators),
            products=list(self.products), without_idle=idle and (list(idle[0]), dict(idle[1])),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedAlone:
    """One step of one optimizer, merged over ranks, without what follows from the steps before it.

    Attributes:
        optimizer: As in `RunStep`.
        step: As in `RunStep`.
        after: As in `RunStep`.
        content: What is merged of it.
        ranks: Ranks that have recorded it.
        last: As in `RunStep`.
    """

    optimizer: str
    step: int
    after: Mapping[str, int]
    content: StepContent
    ranks: tuple[int, ...]
    last: Mapping[int, Observation]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """One step of one optimizer, merged over ranks.

    Attributes:
        optimizer: Name of the optimizer.
        step: Number of the step.
        table: Its sites; of several evaluations of the loss those of the last one, whose gradients are used.
        earlier: The evaluations before that; empty as a rule.
        finished: Whether the optimizer was called. The run may have ended, or been closed, before that.
        unseen: Whether it was called while nothing was recorded. With several optimizers, `every` and `steps` choose
            the steps of one of them; another one that steps in between has left no more than what was seen before.
        missing: Ranks of the run that have not recorded it, without those that had no inputs for it.
        operators: Observations of operators, which are compared inside a module only.
        products: Checks of matrix products, which are judged by themselves, rank by rank.
        last: The last observation of each rank.
        after: The latest step of each other optimizer before this one, as far as the order is known.
        without_idle: `earlier` and `table` without passes from which nothing follows; None if there are none.
        layout: Steps with the same object were merged in the same way; None if that is not known.
        finite: Whether all its numbers are finite.
    """

    optimizer: str
    step: int
    table: dict[SiteKey, MergedSite]
    earlier: list[Evaluation] = field(default_factory=list)
    finished: bool = True
    unseen: bool = False
    missing: tuple[int, ...] = ()
    operators: list[Part] = field(default_factory=list)
    products: list[Part] = field(default_factory=list)
    last: Mapping[int, Observation] = field(default_factory=dict)
    after: Mapping[str, int] = field(default_factory=dict)
    without_idle: tuple[list[Evaluation], dict[SiteKey, MergedSite]] | None = None
    layout: object = None
    finite: bool = False

    def release(self) -> None:
        """Drop the sites, so that no two steps are in memory when the next one is read."""
        self.table.clear()
        self.earlier.clear()
        for one in self.without_idle or ():
            one.clear()
        self.operators.clear()
        self.products.clear()


_MOST_PLANS = 2
"""Some steps of a training have further sites, or another optimizer's."""


class StepMerger:
    """Merges the steps of a run over its ranks, one after the other.

    Args:
        run: The run.
        copies: Parameters that are filed under other names, by rank.
        like: Of the run that it is compared with, whose steps are merged just before: what has the same bits in both
            runs is merged once.
    """

    def __init__(self, run: Run, copies: Copies = NO_COPIES, like: StepMerger | None = None) -> None:
        self._given: SharedSteps[StepContent] | None = None  # to the other run
        own = group_paths(group_numbers(run))
        self._names = {rank: {**own.get(rank, {}), **copies.get(rank, {})} for rank in {**own, **copies}}
        self._taken = None if like is None or self._names else like.shared()  # from the other run
        self._ranks = range(run.world_size)
        self._recorded = run.ranks
        self._tables = MergedTables(run.world_size, num_bits(run.world_size), run.path)
        self._has_copies = bool(copies)
        self._plans: list[TablePlan] = []  # the latest first
        self._layouts: tuple[object, ...] = ()  # of the step before that was not planned
        self._missing: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # ranks of a step, and the missing ones
        # A call of the optimizer is visible by its settings; if these are not recorded, by the sites of earlier steps.
        self._called = "optimizer" in run.run["settings"].get("observe", ())
        self._shows_calls: set[str] = set()
        self._counted: dict[str, int] = {}  # finished steps of each optimizer, if the run was closed
        self._joined: dict[int, list[Joined]] = {}
        for rank in run.ranks:
            content = run.rank_content(rank)
            for name, count in ended(content).steps.items():
                self._counted[name] = max(count, self._counted.get(name, 0))
            if found := joined(content):
                self._joined[rank] = found

    def merged(self, of_ranks: Sequence[StepObservations]) -> RunStep:
        """One step, from what each rank has recorded of it; at least one has."""
        return self.step(self.alone(of_ranks))

    def alone(self, of_ranks: Sequence[StepObservations]) -> MergedAlone:
        """What is known of a step without those before it."""
        if self._joined:
            of_ranks = self._divided_by_active(of_ranks)
        is_merged = of_ranks[0].places is not None
        taken = None if is_merged else self._taken and self._taken.take(of_ranks)
        content = (
            self._merged_content(of_ranks[0]) if is_merged else taken.again() if taken else self._content(of_ranks)
        )
        if self._given is not None and not is_merged:
            self._given.give(of_ranks, content)
        return MergedAlone(
            optimizer=of_ranks[0].optimizer, step=of_ranks[0].step, after=of_ranks[0].after, content=content,
            ranks=self._recorded if is_merged else tuple(one.rank for one in of_ranks),
            last=dict.fromkeys(self._recorded, of_ranks[0].observations[-1]) if is_merged else {
                one.rank: one.observations[-1] for one in of_ranks if one.observations
            },
        )  # fmt: skip

    def step(self, merged: MergedAlone) -> RunStep:
        """A step after those before it, which show whether it was finished. Steps must be given in order."""
        content, optimizer = merged.content, merged.optimizer
        shown = shows_call(content.table)
        finished = self.is_finished(optimizer, merged.step, shown=shown)
        return RunStep(
            optimizer=optimizer, step=merged.step, after=merged.after, finished=finished,
            unseen=finished and not shown and self._would_show(optimizer),
            table=content.table, earlier=content.earlier, operators=content.operators, products=content.products,
            without_idle=content.without_idle, layout=content.layout, finite=content.finite,
            missing=self._without(merged), last=merged.last,
        )  # fmt: skip

    def is_finished(self, optimizer: str, step: int, *, shown: bool) -> bool:
        """Whether the optimizer was called in a step.

        Args:
            optimizer: Its name.
            step: Number of the step.
            shown: See `shows_call`.
        """
        if shown:
            self._shows_calls.add(optimizer)
        if optimizer in self._counted:
            return step < self._counted[optimizer]
        return shown or not self._would_show(optimizer)

    def _would_show(self, optimizer: str) -> bool:
        """True if a recorded call of an optimizer leaves something; see `shows_call`."""
        return self._called or optimizer in self._shows_calls

    def shared(self) -> SharedSteps[StepContent] | None:
        """The steps merged from now on, for the other run; None if some are filed under other names."""
        if not self._names:
            self._given = SharedSteps()
        return self._given

    def forget(self) -> None:
        """Drop what is kept of the latest step for the other run."""
        if self._given is not None:
            self._given.forget()

    def _content(self, of_ranks: Sequence[StepObservations]) -> StepContent:
        """What is merged of a step, by a plan if there is one."""
        finite = all(map(_is_finite, of_ranks))
        plan = next((one for one in self._plans if one.fits(of_ranks)), None)
        if plan is not None:
            planned = plan.planned(of_ranks)
            self._plans = [plan, *(one for one in self._plans if one is not plan)]
            return StepContent(
                table=planned.table, operators=planned.operators, products=planned.products, layout=plan, finite=finite
            )
        operators, products, sites = self._sorted(of_ranks)
        earlier, table = _by_evaluation(sites)
        rest: Rest = without_idle(sites)
        self._plan(of_ranks, sites)
        return StepContent(
            table=table, earlier=earlier, operators=operators, products=products, without_idle=_evaluations(rest),
            finite=finite,
        )  # fmt: skip

    def _merged_content(self, step: StepObservations) -> StepContent:
        """What is merged of a step of a compact recording.

        Raises:
            RecordingError: Parameters are to be filed under other names, and the ranks that hold them are merged.
        """
        if self._has_copies:
            raise RecordingError(
                "A compact recording of a pipeline that holds one weight on several stages cannot be compared with a "
                "run that ties it in one process. Compare the recording from which it was made."
            )
        return StepContent(table=self._tables.table(step), finite=_is_finite(step))

    def _sorted(self, of_ranks: Sequence[StepObservations]) -> tuple[list[Part], list[Part], list[Part]]:
        """The observations of operators, the checks of products, and all others."""
        operators: list[Part] = []
        products: list[Part] = []
        sites: list[Part] = []
        for part in _parts(of_ranks, self._names):
            stage = part[0].stage
            (operators if stage in OPERATOR_STAGES else products if stage in PRODUCT_STAGES else sites).append(part)
        return operators, products, sites

    def _plan(self, of_ranks: Sequence[StepObservations], sites: Sequence[Part]) -> None:
        """Plan the steps that are like this one, if the step before was."""
        layouts = tuple(one.layout for one in of_ranks)
        if not self._names and list(map(id, layouts)) == list(map(id, self._layouts)):
            plan = plan_of(of_ranks, sites)
            self._plans = [plan, *self._plans][:_MOST_PLANS] if plan else self._plans
        self._layouts = layouts

    def _without_inputs(self, step: int) -> dict[int, Joined]:
        """The ranks that had no inputs for a step."""
        return {rank: one for rank, found in self._joined.items() for one in found if step in one.steps}

    def _divided_by_active(self, of_ranks: Sequence[StepObservations]) -> Sequence[StepObservations]:
        """The step with the factors of gradients that were divided by the number of ranks that had inputs."""
        idle = self._without_inputs(of_ranks[0].step)
        if of_ranks[0].places is not None or not any(one.divides_by_active for one in idle.values()):
            return of_ranks
        share = 1.0 - len(idle) / len(self._ranks)
        return [
            replace(
                one,
                observations=[
                    seen if seen.factor == 1.0 else seen._replace(factor=seen.factor * share)
                    for seen in one.observations
                ],
                layout=None,
            )
            for one in of_ranks
        ]

    def _without(self, merged: MergedAlone) -> tuple[int, ...]:
        """The ranks that are missing; cached, because most steps miss the same ones."""
        if self._joined and (idle := self._without_inputs(merged.step)):
            return tuple(rank for rank in self._ranks if rank not in merged.ranks and rank not in idle)
        there = merged.ranks
        if there != self._missing[0]:
            here = frozenset(there)
            self._missing = there, tuple(rank for rank in self._ranks if rank not in here)
        return self._missing[1]


def shows_call(table: Mapping[SiteKey, MergedSite]) -> bool:
    """True if a step has what is recorded when its optimizer was called."""
    return any(key.phase in ("grad", "optimizer", "param") and key.stage == "" for key in table)


def _is_finite(step: StepObservations) -> bool:
    """True if no tensor of a step holds NaN or infinities, and no sum of squares overflowed."""
    summaries = step.summaries
    return not nonfinite_count(summaries).any() and bool(np.isfinite(summaries["sum_of_squares"]).all())


def _by_evaluation(
    sites: Sequence[Part], *, without_idle: bool = False
) -> tuple[list[Evaluation], dict[SiteKey, MergedSite]]:
    """All evaluations of a step but the last one, and the table of the last one with all that is of the whole step.

    Args:
        sites: The sites.
        without_idle: Whether evaluations from which nothing follows were left out. If not, the first one counts even
            if nothing of it is recorded, as in a run that observes only parameters.
    """
    seen_in = {seen.evaluation for seen, _, _ in sites if is_of_evaluation(seen.phase, seen.stage)}
    numbers = sorted(seen_in if without_idle else {0, *seen_in})
    if len(numbers) < 2:
        return [], step_table(sites)
    last = numbers[-1]
    by_number: dict[int, list[Part]] = {number: [] for number in numbers}
    moved: dict[int, list[Part]] = {number: [] for number in numbers}
    for part in sites:
        seen = part[0]
        of_step = not is_of_evaluation(seen.phase, seen.stage) or seen.unobserved.startswith(_OF_ALL)
        of_step |= seen.stage == CARRIED  # known of the first evaluation, and wrong for all
        if seen.phase == "param" and seen.stage == BEFORE and seen.evaluation:
            moved[seen.evaluation].append(part)
        else:
            by_number[last if of_step or seen.phase == "param" or seen.path == ITSELF else seen.evaluation].append(part)
    tables = {number: step_table(parts) for number, parts in by_number.items()}
    found = [{key.path: entry for key, entry in step_table(moved[number]).items()} for number in numbers[1:]]
    earlier = [Evaluation(table=tables[number], moved=at) for number, at in zip(numbers, found, strict=False)]
    return earlier, tables[last]


def _evaluations(rest: Rest) -> tuple[list[Evaluation], dict[SiteKey, MergedSite]] | None:
    """The evaluations of a step without idle passes; None if there are none.

    Rows that were moved have other places than their summaries say.
    """
    if not rest.parts:
        return None
    earlier, table = _by_evaluation(rest.parts, without_idle=True)
    for one in (table, *(one.table for one in earlier)):
        for key in [key for key in one if key._replace(micro_step=0) in rest.moved]:
            one[key] = replace(one[key], placed=False)
    return earlier, table


_OF_ALL = (UNSEEN, MAYBE_UNSEEN)
"""Reasons that hold for a whole step."""


def run_steps(recording: Recording, span: Span = WHOLE_RUN, merger: StepMerger | None = None) -> Iterator[RunStep]:
    """Steps of a recording in the order in which they were taken.

    Args:
        recording: The run.
        span: Steps to read.
        merger: Merges its steps; one of its own if left out.
    """
    merger = merger or StepMerger(recording)
    for of_ranks in rank_steps(recording, span):
        merged = merger.merged(of_ranks)
        of_ranks.clear()  # frees the step before the next one is read
        yield merged
        del merged
        merger.forget()


def _parts(steps: Sequence[StepObservations], copies: Copies) -> Iterator[Part]:
    for step in steps:
        if step.rank in copies:
            yield from under_one_name(step, copies[step.rank])
            continue
        for seen, summary in zip(step.observations, step.summaries, strict=True):
            yield seen, step.rank, summary
