"""Walk through two recordings in parallel, step by step, one step of each in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from traindiff.comparison.stage_groups import group_numbers, group_paths
from traindiff.comparison.step_table import Entry, Key, Part, step_table
from traindiff.comparison.tying import NO_COPIES, Copies, under_one_name
from traindiff.recording import Recording, StepObservations


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """One step of one optimizer, merged over ranks.

    Attributes:
        optimizer: Name of the optimizer.
        step: Number of the step.
        table: Its entries.
        finished: Whether the optimizer was called: the run may have ended, or been closed, before that.
        missing: Ranks of the run that have not recorded it.
    """

    optimizer: str
    step: int
    table: dict[Key, Entry]
    finished: bool = True
    missing: tuple[int, ...] = ()

    def release(self) -> None:
        """Let go of the entries, so that no two steps are in memory when the next one is read."""
        self.table.clear()


def run_steps(recording: Recording, copies: Copies = NO_COPIES) -> Iterator[RunStep]:
    """Steps of a recording in the order in which they were taken.

    Args:
        recording: The run.
        copies: Parameters that are filed under other names, by rank.
    """
    own = group_paths(group_numbers(recording))
    names = {rank: {**own.get(rank, {}), **copies.get(rank, {})} for rank in {*own, *copies}}
    streams = {rank: recording.steps(rank) for rank in recording.ranks}
    heads = {rank: head for rank, stream in streams.items() if (head := next(stream, None)) is not None}
    # Settings of the optimizer are there whenever it was called; without them, what earlier steps had tells.
    called = "optimizer" in recording.run["settings"].get("observe", ())
    shows_calls: set[str] = set()
    while heads:
        first = heads[min(heads)]
        # The rank may have begun later than others.
        lead = min((head for head in heads.values() if head.optimizer == first.optimizer), key=lambda head: head.step)
        here = [head for head in heads.values() if (head.optimizer, head.step) == (lead.optimizer, lead.step)]
        table = step_table(_parts(here, names))
        shown = any(key.phase in ("grad", "optimizer", "param") and key.stage == "" for key in table)
        finished = shown or not (called or lead.optimizer in shows_calls)
        if shown:
            shows_calls.add(lead.optimizer)
        missing = tuple(sorted({*range(recording.world_size)} - {head.rank for head in here}))
        ranks = [head.rank for head in here]
        here.clear()
        yield RunStep(optimizer=lead.optimizer, step=lead.step, table=table, finished=finished, missing=missing)
        del first, lead, table
        for rank in ranks:
            del heads[rank]  # before the next one is read
            if (following := next(streams[rank], None)) is not None:
                heads[rank] = following


def _parts(steps: list[StepObservations], copies: Copies) -> Iterator[Part]:
    for step in steps:
        if step.rank in copies:
            yield from under_one_name(step, copies[step.rank])
            continue
        for seen, summary in zip(step.observations, step.summaries, strict=True):
            yield seen, step.rank, summary


def step_pairs(
    baseline: Iterator[RunStep], candidate: Iterator[RunStep]
) -> Iterator[tuple[RunStep | None, RunStep | None]]:
    """Bring together the steps with one optimizer and number; None where a run does not have it.

    Both runs take their steps in ascending order per optimizer. A step that the other run does not
    have is given back as soon as the other run is past it. A step in the middle of which only one run ended is
    none that both have.
    """
    for left, right in _with_one_number(baseline, candidate):
        if left and right and left.finished != right.finished:
            yield left, None
            yield None, right
        else:
            yield left, right


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
        self._passed: dict[tuple[str, int], RunStep] = {}
        self._reached: dict[str, int] = {}

    def until(self, optimizer: str, step: int) -> Iterator[RunStep]:
        """The steps up to and with this one that were not given yet, in ascending order per optimizer."""
        while self._reached.get(optimizer, -1) < step:
            following = next(self._steps, None)
            if following is None:
                break
            self._reached[following.optimizer] = following.step
            self._passed[following.optimizer, following.step] = following
        due = [key for key in self._passed if key[0] == optimizer and key[1] <= step]
        for key in due:
            yield self._passed.pop(key)

    def rest(self) -> Iterator[RunStep]:
        """The steps that were not given yet."""
        yield from self._passed.values()
        yield from self._steps
