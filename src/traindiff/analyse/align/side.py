"""One of the runs that are compared, as the comparison walks through its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from traindiff.analyse.align.pairs import known_paths
from traindiff.analyse.merge.loss_scale import is_loss_scale
from traindiff.analyse.merge.parameters import Groups, Updates, parameter_groups
from traindiff.analyse.merge.recorded_calls import is_clip
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.run_steps import RunStep
from traindiff.analyse.merge.step_table import Entry, Key
from traindiff.analyse.merge.unobserved import without_missing_samples
from traindiff.core.observation import BOUNDARY, RECOMPUTED, SAMPLE
from traindiff.core.steps import StepSelection, parse_steps
from traindiff.storage import Run


def step_pairs(
    baseline: Iterator[RunStep], candidate: Iterator[RunStep]
) -> Iterator[tuple[RunStep | None, RunStep | None]]:
    """Bring together the steps with one optimizer and number; None where a run does not have it.

    Both runs take their steps in ascending order per optimizer. A step that the other run does not
    have is given back as soon as the other run is past it. A step in the middle of which only one run ended is
    none that both have.
    """
    for own, other in _with_one_number(baseline, candidate):
        if own and other and own.finished != other.finished:
            yield own, None
            yield None, other
        else:
            yield own, other


def _with_one_number(
    baseline: Iterator[RunStep], candidate: Iterator[RunStep]
) -> Iterator[tuple[RunStep | None, RunStep | None]]:
    others = StepsOnDemand(candidate)
    for step in baseline:
        same: RunStep | None = None
        for other in others.until(step.optimizer, step.step):
            if other.step == step.step:
                same = other
            else:
                yield None, other
        yield step, same
    for rest in others.rest():
        yield None, rest


class StepsOnDemand:
    """Steps of a run that another run leads through, each asked for once and in the order of that run.

    Args:
        steps: In the order in which they were taken: ascending per optimizer.
    """

    def __init__(self, steps: Iterator[RunStep]) -> None:
        self._steps = steps
        self._passed: dict[str, deque[RunStep]] = {}
        self._reached: dict[str, int] = {}

    def until(self, optimizer: str, step: int) -> Iterator[RunStep]:
        """The steps up to and with this one that were not given yet, in ascending order per optimizer."""
        while self._reached.get(optimizer, -1) < step:
            following = next(self._steps, None)
            if following is None:
                break
            self._reached[following.optimizer] = following.step
            self._passed.setdefault(following.optimizer, deque()).append(following)
        due = self._passed.get(optimizer, deque())
        while due and due[0].step <= step:
            yield due.popleft()

    def rest(self) -> Iterator[RunStep]:
        """The steps that were not given yet."""
        for passed in self._passed.values():
            while passed:
                yield passed.popleft()
        yield from self._steps


Tables = tuple[dict[Key, Entry], dict[Key, Entry]]
"""One step of both runs, under the baseline's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideStep:
    """One step of one run, with what follows from it.

    Attributes:
        table: Its entries under the baseline's names.
        updates: What the step did to the parameters; not in `table`.
        before: The parameters as the step found them, by path.
        known: Paths of all parameters and buffers that the run has shown so far.
    """

    table: dict[Key, Entry]
    updates: tuple[Entry, ...]
    before: Mapping[str, Entry]
    known: frozenset[str]


class Side:
    """One run, step by step.

    Args:
        recording: The run.
        rename: Turns its paths into the baseline's.

    Attributes:
        recording: The run.
        groups: Parameters of each group of each optimizer, by its name.
        model: Class name of the model.
        goes_on_elsewhere: What has stepped in place of the optimizers that were followed; empty if that is not known.
        paths: Canonical paths of modules and parameters, under the run's own names.
    """

    def __init__(self, recording: Run, rename: Rename = str) -> None:
        self.recording = recording
        self._rename = rename
        self._updates = Updates()
        self._known: frozenset[str] = frozenset()
        contents = [recording.rank_content(rank) for rank in recording.ranks]
        self.paths = known_paths(contents)
        self.model = next((content["model"] for content in contents if "model" in content), "unknown")
        self.goes_on_elsewhere = next(filter(None, (content.get("goes_on_elsewhere") for content in contents)), "")
        self.groups: Groups = parameter_groups(recording, rename)
        self._pipelines = {tuple(content["pipeline"]["ranks"]) for content in contents if "pipeline" in content}

    def step(self, step: RunStep) -> SideStep:
        """What the run has of a step. Steps must be given in order: updates are differences to the last one."""
        renamed = {key: key._replace(path=self._rename(key.path)) for key in step.table}
        table = {renamed[key]: replace(entry, key=renamed[key]) for key, entry in step.table.items()}
        updates, before = self._updates.derive(table, step=step.step)
        self._known |= {key.path for key in table if key.phase == "param"}
        return SideStep(table=table, updates=tuple(updates), before=before, known=self._known)

    def without_missing(self, table: Mapping[Key, Entry], step: RunStep) -> dict[Key, Entry]:
        """The table of a step, without what ranks that have not recorded it would have added to."""
        return without_missing_samples(table, step.missing, pipelines=self.data_parallel if self.is_pipeline else None)

    @property
    def held(self) -> frozenset[str]:
        """Paths of the parameters that the optimizers hold."""
        return frozenset(path for optimizer in self.groups.values() for group in optimizer for path in group)

    @property
    def is_pipeline(self) -> bool:
        """Whether ranks have stages of a pipeline, so that each has sites which others have not."""
        return bool(self._pipelines)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline that a rank has."""
        return tuple(n for ranks in sorted(self._pipelines) for n, other in enumerate(ranks) if other == rank)

    @property
    def data_parallel(self) -> int:
        """Over how many ranks the batch is divided."""
        mesh = self.recording.run.get("mesh") or {}
        return int(mesh.get("data_parallel", 1))

    @property
    def recorded(self) -> frozenset[str]:
        """Phases that the run was asked to record, with `evaluation` if that."""
        settings = self.recording.run["settings"]
        evaluation = frozenset({"evaluation"} if settings.get("evaluation") else ())
        return frozenset(settings.get("observe", ())) | evaluation

    def would_record(self, step: int) -> bool:
        """Whether the run would have recorded this step, had it come so far."""
        settings = self.recording.run["settings"]
        chosen = parse_steps(settings.get("steps"), where="run.json")
        return step % settings.get("every", 1) == 0 and (not isinstance(chosen, StepSelection) or step in chosen)


def join(sides: tuple[SideStep, SideStep]) -> Tables:
    """The tables of two runs' step, with the updates that can be derived in both.

    A run that does not record every step records parameters and buffers before each step that it does; they are left
    out where the other run knows them from the step before.
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
    return tables[0], tables[1]


def sites_in_order(table: Mapping[Key, Entry]) -> dict[Key, Entry]:
    """What is aligned site by site, in execution order.

    Settings are compared by parameter instead, a replayed optimizer is judged by itself, and single samples tell
    how a batch differs. What clips gradients, and loss scales, are compared by what they do. What only a pipeline has,
    and what is computed twice, no other run needs to have.
    """
    sites = (
        (key, entry)
        for key, entry in table.items()
        if not (key.group or key.stage in (SAMPLE, BOUNDARY, RECOMPUTED) or is_clip(key) or is_loss_scale(key))
        and not (key.phase == "update" and key.stage)
    )
    return dict(sorted(sites, key=lambda item: item[1].order))
