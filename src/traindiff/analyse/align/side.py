"""One of the two runs that are compared: its steps, and what of a step is aligned with the other run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

from traindiff.analyse.align.site_map import SideNames
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.parameters import Groups, Updates, movement, parameter_groups, trained_parameters
from traindiff.analyse.merge.recorded_calls import clips, is_clip
from traindiff.analyse.merge.renames import Rename, renames
from traindiff.analyse.merge.run_steps import RunStep
from traindiff.analyse.merge.site import (
    Bits,
    MergedSite,
    SiteKey,
    StepTable,
    gradient_norm,
    is_loss_scale,
    loss_scale,
    origin,
)
from traindiff.analyse.merge.unobserved import without_missing_samples
from traindiff.core.observation import (
    ALIGNMENTS,
    BEFORE,
    BOUNDARY,
    BROADCAST,
    CARRIED,
    CLEARED,
    DRAWS,
    EDITED,
    ESTIMATE,
    FLIPPED,
    MODE,
    RECOMPUTED,
    SAMPLE,
    WITNESS,
)
from traindiff.core.site import ROOT
from traindiff.core.steps import StepSelection, parse_steps
from traindiff.core.tap_registry import shows_any
from traindiff.errors import ConfigError, Problem
from traindiff.storage import Run, ended

# fmt: off
_NOT_PAIRED = frozenset({
    ALIGNMENTS, BOUNDARY, BROADCAST, CARRIED, CLEARED, DRAWS, EDITED, ESTIMATE, FLIPPED, MODE, RECOMPUTED, SAMPLE,
    WITNESS,
})
# fmt: on
"""Stages of sites that are not paired one by one."""

RUNS = ("baseline", "candidate")
"""The two sides, always in this order; tuples of two follow it."""

Tables = tuple[dict[SiteKey, MergedSite], dict[SiteKey, MergedSite]]
"""One step of both runs, under the baseline's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideStep:
    """One step of one run, with what follows from it.

    Attributes:
        table: Its sites under the names that both runs have in common.
        updates: Updates of the parameters; not in `table`.
        before: The parameters as the step found them, by path; of several evaluations, as the last one found them.
        found_after: By path: the step of its optimizer after which a parameter in `before` was seen.
        began: By path: what identifies the bits with which the run, as far as it was read, began.
        known: Paths of all parameters and buffers that the run has shown so far.
        buffers: What each buffer held when the run last showed it, as sites after the step: a buffer of integers is
            recorded again only when it was written.
        earlier: The evaluations of the loss before the last one, with the parameters as each found them, and with how
            they moved until the next.
        unmapped: The same under the baseline's names alone, with the parts of fused tensors one by one.
    """

    table: dict[SiteKey, MergedSite]
    updates: tuple[MergedSite, ...]
    before: Mapping[str, MergedSite]
    known: frozenset[str]
    found_after: Mapping[str, int] = field(default_factory=dict)
    began: Mapping[str, Bits] = field(default_factory=dict)
    buffers: Mapping[SiteKey, MergedSite] = field(default_factory=dict)
    earlier: tuple[SideStep, ...] = ()
    unmapped: SideStep | None = None

    @property
    def own(self) -> SideStep:
        """The step with the parts of fused tensors one by one."""
        return self.unmapped or self


NO_NAMES = SideNames()
"""A map without entries: names are what they are."""


class Side:
    """One run, step by step.

    Args:
        recording: The run.
        rename: Turns its paths into the baseline's.
        names: How these become the names that both runs have in common.

    Attributes:
        recording: The run.
        groups: Parameters of each group of each optimizer, by its name.
        main: Name of the first optimizer, which counts the training's steps; empty if unknown.
        held: Paths of the parameters that the optimizers hold; empty if unknown.
        trained: Those of them that require a gradient.
        recorded: What the run was asked to record: names of `tap_registry.OBSERVABLE`, `evaluation`; empty if unknown.
        model: Class name of the model.
        goes_on_elsewhere: What steps in place of the recorded optimizers; empty if unknown.
        paths: Canonical paths of modules and parameters, under the baseline's names.
        derived: Makes its updates.
        buffers: What each buffer held when the run last showed it.

    Raises:
        ConfigError: Two of the run's paths get one name.
    """

    def __init__(self, recording: Run, rename: Rename = str, names: SideNames = NO_NAMES) -> None:
        self.recording = recording
        self._rename = rename
        self._names = names
        self._known: frozenset[str] = frozenset()
        self.buffers: dict[SiteKey, MergedSite] = {}
        self._began: dict[str, Bits] | None = None
        contents = [recording.rank_content(rank) for rank in recording.ranks]
        paths = {path for one in contents for part in ("modules", "parameters") for path in one.get(part, {})}
        self.paths = frozenset(map(names.common, _renamed(paths, rename)))
        self.model = next((content["model"] for content in contents if "model" in content), "unknown")
        self.goes_on_elsewhere = next(filter(None, (content.get("goes_on_elsewhere") for content in contents)), "")

        def common(path: str) -> str:
            return names.common(rename(path))

        self.groups: Groups = parameter_groups(recording, common)
        self.main = next(iter(self.groups), "")
        self.derived = Updates([*self.groups][1:])
        self.held = frozenset(path for optimizer in self.groups.values() for group in optimizer for path in group)
        self.trained = trained_parameters(recording, self.groups, common)
        settings = recording.run["settings"]
        evaluation = ["evaluation"] if settings.get("evaluation") else []
        self.recorded = frozenset([*settings.get("observe", ()), *evaluation])
        self._pipelines = {tuple(content["pipeline"]["ranks"]) for content in contents if "pipeline" in content}

    def step(self, step: RunStep, *, first: bool = True) -> SideStep:
        """The run's part of a step. Steps must be given in order: updates are differences to the last one.

        Args:
            step: The step.
            first: False if the two runs have parameters of their own by now.
        """
        table = self._renamed(step.table)
        updates, before = self.derived.derive(table, step=step.step, optimizer=step.optimizer)
        if self._began is None:
            self._began = {path: bits for path, entry in before.items() for bits in origin([entry])}
        if not (shows := {key.path for key in table if key.phase == "param"}) <= self._known:
            self._known |= shows
        shown = {
            key: entry for key, entry in table.items()
            if key.phase == "param" and key.slot == "buffer" and not entry.unobserved
        }  # fmt: skip
        for key in sorted(shown, key=lambda key: key.stage != BEFORE):  # what the step wrote comes last
            after = key._replace(stage="")
            self.buffers[after] = replace(shown[key], key=after, parts=())
        earlier = []
        for one in step.earlier:
            moved = {self._rename(path): entry for path, entry in one.moved.items() if not entry.unobserved}
            moves = [movement(path, before[path], entry) for path, entry in moved.items() if path in before]
            own = self._renamed(one.table)
            earlier.append(SideStep(table=own, updates=tuple(moves), before=before, known=self._known))
            before = {**before, **moved}
        if earlier:  # the first evaluation found them
            for key in [key for key in table if key[:2] == ("param", BEFORE)]:
                earlier[0].table[key] = table.pop(key)
        one_step = SideStep(
            table=table, updates=tuple(updates), before=before, known=self._known, buffers=dict(self.buffers),
            earlier=tuple(earlier), found_after=self.derived.found_after, began=self._began,
        )  # fmt: skip
        return self._in_common(one_step, first=first)

    def like(self, other: SideStep) -> SideStep:
        """The run's part of a step in which it has the bits of the other run, since the steps before."""
        values, buffers = _parameters_in(other.table)
        before = {path: entry for path, entry in self.derived.known.items() if path not in values}
        before.update((path, other.before[path]) for path in values if path in other.before)
        held = {key: other.buffers[key] for key in buffers if key in other.buffers}
        return replace(other, before=before, known=self._known, buffers={**self.buffers, **held})

    def follow(self, other: Side, sites: Iterable[SiteKey]) -> None:
        """Take over what the other run knows, after steps with these sites in which both runs have the same bits."""
        values, buffers = _parameters_in(sites)
        self.derived.follow(other.derived, values)
        self.buffers.update((key, other.buffers[key]) for key in buffers if key in other.buffers)

    def _in_common(self, one: SideStep, *, first: bool) -> SideStep:
        """A step under the names that both runs have in common: updates are derived, so parts may be merged."""
        if not self._names.hidden:
            return one
        joined, common = self._names.joined, self._names.common
        before = joined({entry.key: entry for entry in one.before.values()})
        return SideStep(
            table=joined(one.table, activations=first), buffers=joined(one.buffers), unmapped=one,
            updates=tuple(joined({entry.key: entry for entry in one.updates}).values()),
            before={key.path: entry for key, entry in before.items()}, known=frozenset(map(common, one.known)),
            found_after={common(path): step for path, step in one.found_after.items()},
            earlier=tuple(self._in_common(evaluation, first=first) for evaluation in one.earlier),
        )  # fmt: skip

    def _renamed(self, table: StepTable) -> dict[SiteKey, MergedSite]:
        if not renames(self._rename):
            return dict(table)
        renamed = {key: key._replace(path=self._rename(key.path)) for key in table}
        return {renamed[key]: replace(entry, key=renamed[key]) for key, entry in table.items()}

    def without_missing(self, table: StepTable, step: RunStep) -> dict[SiteKey, MergedSite]:
        """The table of a step; sites are unknown if ranks are missing that would have contributed to them."""
        return without_missing_samples(table, step.missing, pipelines=self.data_parallel if self.is_pipeline else None)

    @property
    def is_pipeline(self) -> bool:
        """True if ranks have different stages of a pipeline, and so different sites."""
        return bool(self._pipelines)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The pipeline stages of a rank."""
        return tuple(n for ranks in sorted(self._pipelines) for n, other in enumerate(ranks) if other == rank)

    @property
    def shows_evaluations(self) -> bool:
        """True if it recorded something that each evaluation of the loss has, so that their number is known."""
        return shows_any(self.recorded, _OF_EACH_EVALUATION)

    @property
    def data_parallel(self) -> int:
        """Number of ranks that share the batch."""
        mesh = self.recording.run.get("mesh") or {}
        return int(mesh.get("data_parallel", 1))

    def ends_before(self, optimizer: str, step: int) -> bool:
        """True if the run has no such step although its settings select it, as far as that is known.

        With several optimizers, the settings select steps of one of them, and what others do meanwhile is recorded.
        """
        settings = self.recording.run["settings"]
        if len(self.groups) > 1:
            counts = [ended(self.recording.rank_content(rank)).steps for rank in self.recording.ranks]
            if any(count.get(optimizer, 0) > step for count in counts):
                return False
        chosen = parse_steps(settings.get("steps"), where="run.json")
        return step % settings.get("every", 1) == 0 and (not isinstance(chosen, StepSelection) or step in chosen)


def without_earlier(one: SideStep) -> SideStep:
    """A step with its last evaluation of the loss alone, and the parameters that the first one found."""
    if not one.earlier:
        return one
    found = {key: entry for key, entry in one.earlier[0].table.items() if key[:2] == ("param", BEFORE)}
    return replace(one, table={**found, **one.table}, earlier=())


_OF_EACH_EVALUATION = frozenset({"batch", "forward", "loss", "backward"})


def _parameters_in(sites: Iterable[SiteKey]) -> tuple[set[str], set[SiteKey]]:
    """Paths of the parameters of a step, and sites of its buffers after it."""
    found = [key for key in sites if key.phase == "param"]
    values = {key.path for key in found if key.slot == "value"}
    return values, {key._replace(stage="") for key in found if key.slot == "buffer"}


def _renamed(paths: Iterable[str], rename: Rename) -> frozenset[str]:
    """The candidate's paths under the baseline's names, which must stay distinct."""
    by_name: dict[str, list[str]] = {}
    for path in sorted(paths):
        by_name.setdefault(rename(path), []).append(path)
    problems = [
        Problem(
            where="rename",
            what=f"gives {' and '.join(path or ROOT for path in same)} of the candidate the same path, {name or ROOT}.",
            fix="Write expressions that keep the candidate's paths apart.",
        )
        for name, same in by_name.items()
        if len(same) > 1
    ]
    if problems:
        raise ConfigError("compare(...)", problems, consequence="nothing was compared")
    return frozenset(by_name)


def join(sides: tuple[SideStep, SideStep]) -> Tables:
    """The tables of one step of two runs, with the updates that both runs have.

    A run that skips steps records parameters and buffers before each recorded step. These are left out if the other run
    knows them from the step before. A buffer that one run saw written in this step holds in the other what it held
    when it was last shown.
    """
    derivable = {entry.key for entry in sides[0].updates} & {entry.key for entry in sides[1].updates}
    tables = []
    for one in sides:
        table = dict(one.table)
        table.update((entry.key, entry) for entry in one.updates if entry.key in derivable)
        tables.append(table)
    for table, other, known in zip(tables, tables[::-1], (sides[1].known, sides[0].known), strict=True):
        for key in [key for key in table if key.stage == "before" and key.phase == "param"]:
            if key not in other and key.path in known:
                del table[key]
    for table, other, own in zip(tables, tables[::-1], sides, strict=True):
        for key in [key for key in own.buffers if key in other and key not in table]:
            last = max((entry.order for entry in table.values()), default=0)
            table[key] = replace(own.buffers[key], order=last)
    return tables[0], tables[1]


def sites_in_order(table: StepTable) -> dict[SiteKey, MergedSite]:
    """The sites that are paired one by one, in execution order.

    Left out are settings (compared by parameter), replayed optimizers (judged by a rule), single samples, clipping,
    loss scales, boundaries of pipelines, recomputed activations, edited parameters, modes of modules, and gradients
    that were not cleared, or cleared too early.
    """
    sites = ((key, entry) for key, entry in table.items() if _is_paired(key))
    return dict(sorted(sites, key=lambda item: item[1].order))


@lru_cache(maxsize=1 << 16)
def _is_paired(key: SiteKey) -> bool:
    if key.group or key.stage in _NOT_PAIRED or is_clip(key) or is_loss_scale(key):
        return False
    return not (key.phase == "update" and key.stage)


def with_gradient_stages(table: StepTable, other: StepTable, *, asked: bool) -> dict[SiteKey, MergedSite]:
    """The table with the gradient stages that the other run has: an unchanged gradient is the same in the next stage.

    Args:
        table: A run's step.
        other: The same step of the other run.
        asked: Whether the run was asked to record the stages. If not, gradients before clipping are unknown.
    """
    has_scale, result = loss_scale(table) != 1.0, dict(table)
    seen = [entry.order for key, entry in table.items() if key[:2] == ("grad", "")]
    if not seen or (not asked and (has_scale or clips(table))):
        return result
    for key in other:
        if key.phase != "grad" or key.stage not in ("reduced", "unscaled") or key in table:
            continue
        before = table.get(key._replace(stage="reduced")) if key.stage == "unscaled" and not has_scale else None
        held = before or table.get(key._replace(stage=""))
        if held is not None:
            result[key] = replace(held, key=key, order=min(seen) - 1)
    return result


def gradient_norms(pairs: Iterable[Pair]) -> list[Pair]:
    """The norm of all gradients of both runs, as a pair; empty if there are no gradients."""
    gradients = [pair for pair in pairs if pair.baseline.key.phase == "grad" and not pair.baseline.key.stage]
    if not gradients:
        return []
    return [
        Pair(
            baseline=gradient_norm([pair.baseline for pair in gradients]),
            candidate=gradient_norm([pair.candidate for pair in gradients]),
        )
    ]


def step_pairs(
    baseline: Iterator[RunStep], candidate: Iterator[RunStep], begun: int = 0
) -> Iterator[tuple[RunStep | None, RunStep | None]]:
    """Pairs of steps with the same optimizer and number; None for a run that does not have the step.

    Both runs take their steps in ascending order per optimizer. A step that the other run lacks is yielded as soon as
    the other run is past it. If only one run finished a step, or saw it, the step counts as present in that run alone.

    Args:
        baseline: Steps of the run that is trusted.
        candidate: Steps of the other run.
        begun: Number of the baseline's first step.
    """
    return finished_alike(with_one_number(baseline, candidate, begun))


def finished_alike(
    pairs: Iterable[tuple[RunStep | None, RunStep | None]],
) -> Iterator[tuple[RunStep | None, RunStep | None]]:
    """The pairs; each step that only one run finished, or saw, is in a pair for each run."""
    for own, other in pairs:
        if own and other and (own.finished != other.finished or own.unseen != other.unseen):
            yield own, None
            yield None, other
        else:
            yield own, other


class _Step(Protocol):
    """A step of one optimizer, by its number."""

    @property
    def optimizer(self) -> str:
        """Name of the optimizer."""

    @property
    def step(self) -> int:
        """Number of the step."""


StepType = TypeVar("StepType", bound=_Step)


class StepsOnDemand(Generic[StepType]):
    """Returns the steps of one run in the order in which another run took them; each step only once.

    Args:
        steps: Steps in the order in which the run took them: ascending for each optimizer.
        begun: Number of the other run's first step; those before it are given with whatever is asked for.
    """

    def __init__(self, steps: Iterator[StepType], begun: int = 0) -> None:
        self._steps = steps
        self._begun = begun
        self._passed: dict[str, deque[StepType]] = {}
        self._reached: dict[str, int] = {}

    def until(self, optimizer: str, step: int) -> Iterator[StepType]:
        """The steps up to and including this one that were not given yet, ascending per optimizer.

        Each is read when it is asked for. Only those of other optimizers that come before it are kept.
        """
        due = self._passed.setdefault(optimizer, deque())
        while due and due[0].step <= step:
            yield due.popleft()
        while self._reached.get(optimizer, -1) < step:
            following = next(self._steps, None)
            if following is None:
                break
            self._reached[following.optimizer] = following.step
            if following.step < self._begun or (following.optimizer == optimizer and following.step <= step):
                yield following
            else:
                self._passed.setdefault(following.optimizer, deque()).append(following)
            del following

    def rest(self) -> Iterator[StepType]:
        """The steps that were not given yet."""
        for passed in self._passed.values():
            while passed:
                yield passed.popleft()
        yield from self._steps


def with_one_number(
    baseline: Iterator[StepType], candidate: Iterator[StepType], begun: int = 0
) -> Iterator[tuple[StepType | None, StepType | None]]:
    """Pairs of steps with the same optimizer and number; None for a run that does not have the step."""
    others = StepsOnDemand(candidate, begun)
    for step in baseline:
        same: StepType | None = None
        for other in others.until(step.optimizer, step.step):
            if (other.optimizer, other.step) == (step.optimizer, step.step):
                same = other
            else:
                yield None, other
        yield step, same
    for rest in others.rest():
        yield None, rest
