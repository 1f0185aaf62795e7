"""Walk through one recording step by step, with one step of all its ranks in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from traindiff.merging.parameter_groups import group_numbers, group_paths
from traindiff.merging.step_table import Entry, Key, Part, step_table
from traindiff.merging.tying import NO_COPIES, Copies, under_one_name
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
