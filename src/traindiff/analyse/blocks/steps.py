"""The steps of runs, merged by other processes block by block, in the order in which one process reads them.

A block is read and merged by itself. What follows from the steps before it (whether an optimizer had been called) is
added here, so that steps are the same as if one process had read all of them.
"""

from __future__ import annotations

import math
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from traindiff.analyse.align.side import finished_alike, step_pairs, with_one_number
from traindiff.analyse.blocks.tasks import Tasks, Workers, tasks_of
from traindiff.analyse.merge.packed_steps import PackedSteps, Packer, Unpacker
from traindiff.analyse.merge.parameters import NO_COPIES, Copies
from traindiff.analyse.merge.rank_steps import rank_steps
from traindiff.analyse.merge.run_steps import MergedAlone, RunStep, StepMerger, run_steps
from traindiff.analyse.merge.span import WHOLE_RUN, Span
from traindiff.storage import Recording, read_in_turns

BLOCK_BYTES = 1 << 27
"""A block has as many steps as this is their size on disk, over all ranks and runs; and at least one."""

_IN_MEMORY = 8
"""What a task takes of memory, by the size of its block on disk."""

_BLOCKS_PER_WORKER = 4
"""At least, so that all of them have work to the end."""

_LEAST_TASK_BYTES = 1 << 28


_Made = TypeVar("_Made")
"""What a worker keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a worker needs to read runs; it opens them once.

    Attributes:
        key: Its own.
        content: The recordings and the parameters of each that are filed under other names, pickled.
    """

    key: str
    content: bytes

    @classmethod
    def of(cls, recordings: Sequence[Recording], copies: Sequence[Copies]) -> Source:
        """Of these recordings."""
        return cls(key=uuid.uuid4().hex, content=pickle.dumps((list(recordings), list(copies))))


class Readers:
    """Recordings in a worker, with what is known from blocks before."""

    _latest: tuple[str, Readers] | None = None

    def __init__(self, recordings: Sequence[Recording], copies: Sequence[Copies]) -> None:
        self.recordings = recordings
        self.packer = Packer()
        self.mergers: list[StepMerger] = []
        self._kept: dict[object, Any] = {}
        read_in_turns(recordings)
        for recording, own in zip(recordings, copies, strict=True):
            self.mergers.append(StepMerger(recording, own, like=self.mergers[0] if self.mergers else None))

    @classmethod
    def of(cls, source: Source) -> Readers:
        """Those of a source, opened when it is first met."""
        if cls._latest is None or cls._latest[0] != source.key:
            cls._latest = source.key, cls(*pickle.loads(source.content))
        return cls._latest[1]

    def kept(self, name: object, make: Callable[[], _Made]) -> _Made:
        """What was made under this name in a block before; made now in the first one."""
        if name not in self._kept:
            self._kept[name] = make()
        found: _Made = self._kept[name]
        return found

    def alone(self, number: int, span: Span, *, before: bool) -> Iterator[MergedAlone]:
        """The steps of one of the recordings."""
        merger = self.mergers[number]
        for of_ranks in rank_steps(self.recordings[number], span, before=before):
            merged = merger.alone(of_ranks)
            of_ranks.clear()
            yield merged
            del merged
            merger.forget()


def merged_block(source: Source, span: Span, before: bool) -> list[PackedSteps]:  # noqa: FBT001  called by tasks
    """The steps of a block: those of two runs with the same number together."""
    readers = Readers.of(source)
    streams = [readers.alone(number, span, before=before) for number in range(len(readers.recordings))]
    together: Iterable[Sequence[MergedAlone | None]] = (
        with_one_number(streams[0], streams[1]) if len(streams) == 2 else ([one] for one in streams[0])
    )
    return [readers.packer.packed(both) for both in together]


def pairs_of(
    recordings: tuple[Recording, Recording],
    span: Span = WHOLE_RUN,
    *,
    copies: tuple[Copies, Copies] = (NO_COPIES, NO_COPIES),
    tasks: Tasks | None = None,
) -> Iterator[tuple[RunStep | None, RunStep | None]]:
    """The steps of two runs that are compared, as `step_pairs` brings them together.

    Args:
        recordings: The runs.
        span: Steps to read.
        copies: For each run: parameters that are filed under other names, by rank.
        tasks: Reads and merges blocks of them; this process alone, if left out. Runs that are not divided are read by
            this process too: compact ones, and those in which a rank has several optimizers.
    """
    divided = [tasks is not None and is_divided(one) for one in recordings]
    read_in_turns(recordings)
    first = StepMerger(recordings[0], copies[0])
    second = StepMerger(recordings[1], copies[1], like=None if any(divided) else first)
    if tasks is not None and all(divided):  # those of one number come together, so none has to wait for the other run
        results = block_results(recordings, merged_block, tasks, span, copies)
        return finished_alike((own, other) for own, other in _merged(results, (first, second)))
    own, other = (
        _stream(one, span, copied, merger, tasks)
        for one, copied, merger in zip(recordings, copies, (first, second), strict=True)
    )
    return step_pairs(own, other, recordings[0].run.get("first_step") or 0)


_Result = TypeVar("_Result")
"""Of one step."""


def block_results(
    recordings: Sequence[Recording],
    of_block: Callable[[Source, Span, bool], list[_Result]],
    tasks: Tasks,
    span: Span = WHOLE_RUN,
    copies: Sequence[Copies] | None = None,
) -> Iterator[_Result]:
    """What tasks find out about each step of runs that are divided, in the order of the steps.

    Args:
        recordings: The runs.
        of_block: Called by tasks with the source, the steps of a block, and whether to begin with the step before them.
        tasks: Run in worker processes.
        span: Steps to read.
        copies: As for `streams_of`.
    """
    source = Source.of(recordings, copies or [NO_COPIES] * len(recordings))
    spans, task_bytes = blocks(recordings, span, tasks.size)
    calls = ((source, one, number == 0) for number, one in enumerate(spans))
    for block in tasks.ordered(of_block, calls, task_bytes=task_bytes):
        block.reverse()
        while block:
            yield block.pop()  # and keep none


def steps_of(recording: Recording, workers: Workers) -> Iterator[RunStep]:
    """The steps of one run, read by workers if these are wanted; these end with the iterator."""
    with tasks_of(workers) as tasks:
        yield from _stream(recording, WHOLE_RUN, NO_COPIES, StepMerger(recording), tasks)


def _stream(
    recording: Recording, span: Span, copies: Copies, merger: StepMerger, tasks: Tasks | None
) -> Iterator[RunStep]:
    """The steps of one run, in the order in which it took them."""
    if tasks is None or not is_divided(recording):
        yield from run_steps(recording, span, merger)
        return
    for (step,) in _merged(block_results([recording], merged_block, tasks, span, [copies]), [merger]):
        if step is not None:
            yield step
        del step


def _merged(packed: Iterator[PackedSteps], mergers: Sequence[StepMerger]) -> Iterator[list[RunStep | None]]:
    """The steps of all runs that were packed together.

    Args:
        packed: The steps.
        mergers: One for each run, for what follows from the steps before.
    """
    unpacker = Unpacker()
    while (one := next(packed, None)) is not None:
        steps = unpacker.unpacked(one)
        del one
        both = [None if step is None else merger.step(step) for merger, step in zip(mergers, steps, strict=True)]
        del steps
        yield both
        del both


def is_divided(recording: Recording) -> bool:
    """True if the steps of a recording can be cut into blocks: where they are is known by their numbers."""
    return (
        not recording.is_compact
        and bool(recording.ranks)
        and all(recording.only_optimizer(rank) for rank in recording.ranks)
    )


def blocks(recordings: Sequence[Recording], span: Span, size: int) -> tuple[list[Span], int]:
    """Blocks of steps, and the memory that a task takes for one of them.

    Args:
        recordings: The runs.
        span: The steps of all blocks.
        size: Number of tasks that run at a time.
    """
    lasts = [last for one in recordings for rank in one.ranks if (last := one.last_step(rank)) is not None]
    every = min(int(one.run["settings"].get("every", 1)) for one in recordings)
    end = max(lasts, default=0) if span.end is None else min(span.end, max(lasts, default=0))
    step_bytes = sum(one.step_bytes(one.ranks[0]) * len(one.ranks) for one in recordings)
    count = max(1, math.ceil((end + 1 - span.begin) / every))
    length = max(1, min(int(BLOCK_BYTES // max(1.0, step_bytes)), count // (_BLOCKS_PER_WORKER * size)))
    begins = range(span.begin, end + 1, length * every) or [span.begin]
    ends = [begin - 1 for begin in begins[1:]]
    found = [Span(begin=begin, end=last) for begin, last in zip(begins, [*ends, span.end], strict=True)]
    return found, max(_LEAST_TASK_BYTES, int(_IN_MEMORY * step_bytes * length))
