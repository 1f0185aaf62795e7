"""`traindiff compact`: a recording whose ranks are merged once, step by step."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traindiff.analyse.blocks.steps import block_results, is_divided
from traindiff.analyse.blocks.tasks import Tasks, Workers, refuse_workers, tasks_of
from traindiff.analyse.compact.step_rows import RowsOfSteps, StepRows, rows_of_block
from traindiff.analyse.merge.rank_steps import rank_steps
from traindiff.analyse.merge.run_steps import StepMerger
from traindiff.analyse.merge.span import Span
from traindiff.core.summary import empty
from traindiff.core.untrusted.local_files import local_path
from traindiff.errors import ConfigError, Problem, RecordingError
from traindiff.storage import Follower, Recording, RecordingWriter, StepObservations, not_following, open_followed
from traindiff.storage.location import MERGED, PLACES, size_bytes
from traindiff.storage.merged_rows import whole_mark
from traindiff.storage.places import PlaceWriter
from traindiff.storage.stores import protocol_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """What compacting a recording has made.

    Attributes:
        recording: The recording.
        output: The compact one.
        ranks: Number of its ranks.
        steps: Number of its steps.
        whole: Number of steps that are still stored rank by rank, by the reason.
        bytes_before: Size of the recording; None if it is not on this machine.
        bytes_after: Size of the compact one.
        created: When the recording was made, as its `run.json` says.
        notes: Ranks of a run that was followed to which nothing was added for too long, one sentence each.
        is_kept: Whether the recording stays as it is, because its compact form is not smaller.
    """

    recording: str
    output: str
    ranks: int
    steps: int
    whole: Mapping[str, int]
    bytes_before: int | None
    bytes_after: int
    created: str = ""
    notes: tuple[str, ...] = ()
    is_kept: bool = False

    def __str__(self) -> str:
        if self.is_kept:
            sizes = f"{_size_text(self.bytes_after)}, and it takes {_size_text(self.bytes_before or 0)}"
            return f"{self.output} stays as it is: its compact form would take {sizes}."
        before = f"{_size_text(self.bytes_before)} are now " if self.bytes_before is not None else ""
        size = f"{before}{_size_text(self.bytes_after)}"
        parts = self.ranks * self.steps
        rate = f", {self.bytes_after / parts / 1000.0:.2g} kB per rank and step" if parts else ""
        lines = [f"{self.output}: {_count(self.steps, 'step')} of {_count(self.ranks, 'rank')}; {size}{rate}."]
        lines += [f"{_count(number, 'step')} stored rank by rank: {reason}." for reason, number in self.whole.items()]
        return "\n".join([*lines, *self.notes])


def default_output(recording: str) -> str:
    """The path of the compact form of a recording, if none is given: beside it, also if it is the working directory."""
    path = recording.rstrip("/") or recording
    has_name = protocol_of(recording) or Path(path).name not in ("", "..")
    return f"{path if has_name else os.path.realpath(path)}-compact"


ASKED = "asked for with --whole-every"
INCOMPLETE = "some ranks lack the step, or end in it or before it"
NOT_CALLED = "the recording ended before the optimizer was called in it"


def compact(
    recording: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    whole_every: int | None = None,
    progress: Callable[[int], None] | None = None,
    workers: Workers = None,
    follow: Follower | None = None,
) -> Compacted:
    """Merge the ranks of a recording once, into a smaller one of which everything else can be asked as before.

    Args:
        recording: The recording; it is only read. One that is compact already may be given.
        output: Path of the smaller one. It is there when all of it has been written.
        whole_every: Also keep every n-th step rank by rank, if the recording has it so.
        progress: Called with the number of each step.
        workers: Number of worker processes on this machine that read the recording, or `"ray"` for those of a Ray
            cluster. The result is the same.
        follow: Waits for steps of a run that goes on; each is merged when all ranks have it.

    Returns:
        What was made; `print` it.

    Raises:
        ConfigError: There is something at `output`, or the recording holds what cannot be merged.
        RecordingError: The recording cannot be used.
        WorkerError: Worker processes died again and again.
    """
    refuse_workers(workers, follow, recording)
    follower = follow or not_following()
    run = open_followed(os.fspath(recording), follower)
    target = Path(output)
    if problems := _problems(run, os.fspath(output), whole_every):
        raise ConfigError("traindiff compact", problems, consequence="nothing was written")
    unfinished = target.with_name(f"{target.name}.unfinished-{os.getpid()}")
    try:
        with tasks_of(workers) as tasks, _Compacting(run, str(target), unfinished, whole_every, tasks) as compacting:
            for step in compacting.run():
                if progress:
                    progress(step)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    local = local_path(run.path)
    before = size_bytes(local) if local is not None and Path(local).is_dir() else None
    return Compacted(
        recording=run.path, output=str(target), ranks=len(run.ranks), steps=compacting.num_steps,
        whole=dict(compacting.whole), bytes_before=before,
        bytes_after=size_bytes(str(target)), notes=tuple(follower.notes()), created=str(run.run.get("created", "")),
    )  # fmt: skip


def _problems(run: Recording, target: str, whole_every: int | None) -> list[Problem]:
    problems = []
    if protocol_of(target):
        fix = "Give the path of a local directory (-o), and copy it to the store."
        problems.append(Problem(where=target, what="is no path on this machine.", fix=fix))
    elif os.path.lexists(target):
        fix = "Give the path of a directory that does not exist yet."
        problems.append(Problem(where=target, what="is there already.", fix=fix))
    elif not protocol_of(run.path) and Path(os.path.realpath(target)).is_relative_to(os.path.realpath(run.path)):
        fix = "Give the path of a directory outside of it (-o)."
        problems.append(Problem(where=target, what=f"is inside the recording {run.path}.", fix=fix))
    if whole_every is not None and whole_every < 1:
        what, fix = "must be a whole number of steps, at least 1.", "Write 100 to keep every hundredth step whole."
        problems.append(Problem(where=f"--whole-every {whole_every}", what=what, fix=fix))
    details = [name for name in run.run["settings"].get("detail", ["summary"]) if name != "summary"]
    if details:
        what = f"holds more than summaries ({', '.join(details)}), which cannot be merged over ranks."
        problems.append(Problem(where=run.path, what=what, fix="Keep it as it is; compact recordings of summaries."))
    if not run.ranks:
        problems.append(Problem(where=run.path, what="has no ranks.", fix="Give a recording with steps."))
    return problems


class _Compacting:
    """Writes a compact recording. To be used in a `with` statement.

    Args:
        run: The recording.
        name: How messages call the compact one.
        target: Where it is written.
        whole_every: See `compact`.
        tasks: Read and merge the steps; this process alone, if None.
    """

    def __init__(self, run: Recording, name: str, target: Path, whole_every: int | None, tasks: Tasks | None) -> None:
        self._name = name
        self.whole: Counter[str] = Counter()
        self.num_steps = 0
        self._run = run
        self._target = str(target)
        self._whole_every = whole_every
        self._tasks = tasks
        self._stack = ExitStack()
        self._writers: dict[int, RecordingWriter] = {}
        self._lead = min(run.ranks)
        self._merger = StepMerger(run)
        self._endings: dict[str, Any] = {}  # of ranks that were not closed, once that is known
        self._tail: int | None = None  # the first step in which one of them ends
        self._not_ended = list(run.ranks)

    def __enter__(self) -> _Compacting:
        with self._making():
            self._of_rank(self._lead)
            self._merged = self._open(MERGED)
            self._places = PlaceWriter(self._open(PLACES))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> Iterator[int]:
        """Write all steps, and yield the number of each."""
        for found, of_ranks in self._steps():
            with self._making():
                self._write(found, of_ranks)
            self.num_steps += 1
            yield found.step
        self._see_endings()
        with self._making():
            for rank in self._run.ranks:
                self._of_rank(rank).write_rank(self._run.rank_content(rank))  # which says since how the training ended
                if rank != self._lead:
                    self._writers.pop(rank).close()
            self._writers[self._lead].write_run(self._content(self._endings))
            self._writers[self._lead].close()
            self._merged.close()

    @contextmanager
    def _making(self) -> Iterator[None]:
        """Say of an error of a writer what was not made; nothing is left of it."""
        try:
            yield
        except (ConfigError, OSError) as error:
            why = error.problems[0].what if isinstance(error, ConfigError) else f"{error.strerror or error}."
            fix = "Nothing of it remains. Give the path of a directory where you may write and there is room."
            raise RecordingError(f"{self._name} was not made: {why} {fix}") from None

    def _see_endings(self) -> None:
        """Note how ranks have ended; of a run that goes on, those to which nothing is added any more."""
        for rank in [rank for rank in self._not_ended if self._run.is_read(rank)]:
            self._not_ended.remove(rank)
            status = self._run.status(rank)
            if status.ending != "closed":
                self._endings[str(rank)] = {"ending": status.ending, "message": status.message}
                last = self._run.last_step(rank)
                ends = -1 if last is None else last
                self._tail = ends if self._tail is None else min(self._tail, ends)

    def _steps(self) -> Iterator[tuple[StepRows, Sequence[StepObservations] | None]]:
        """The rows of each step, and what its ranks have recorded, if this process has read it."""
        if self._tasks is not None and is_divided(self._run):
            for found in block_results([self._run], rows_of_block, self._tasks):
                yield found, None
            return
        maker = RowsOfSteps(self._run, self._merger)
        for of_ranks in rank_steps(self._run):
            yield maker.of(of_ranks), of_ranks
            of_ranks.clear()

    def _write(self, found: StepRows, of_ranks: Sequence[StepObservations] | None) -> None:
        is_merged = of_ranks is not None and of_ranks[0].places is not None
        finished = self._merger.is_finished(found.optimizer, found.step, shown=found.shown)
        reason = "" if is_merged else self._reason(found, finished=finished)
        if not reason:
            assert found.rows is not None
            numbers = {number: self._places.number(places) for number, places in found.places.items()}
            rows = [one._replace(term=numbers[one.term]) for one in found.rows.observations]
            self._merged.write_step(rows, found.rows.numbers)
            return
        self.whole[reason] += 1
        for one in self._recorded(found) if of_ranks is None else of_ranks:
            if one.observations:
                self._of_rank(one.rank).write_step(one.observations, one.summaries)
        self._merged.write_step([whole_mark(found.optimizer, found.step)], empty(1))

    def _recorded(self, found: StepRows) -> Sequence[StepObservations]:
        """A step as its ranks have recorded it."""
        return next(rank_steps(self._run, Span(begin=found.step, end=found.step), before=False))

    def _reason(self, found: StepRows, *, finished: bool) -> str:
        """Why a step is stored rank by rank; empty if its ranks are merged."""
        if self._whole_every is not None and found.step % self._whole_every == 0:
            return ASKED
        self._see_endings()
        if found.ranks < len(self._run.ranks) or (self._tail is not None and found.step >= self._tail):
            return INCOMPLETE
        return found.reason if finished else NOT_CALLED

    def _of_rank(self, rank: int) -> RecordingWriter:
        """The writer of a rank's own stream."""
        if rank not in self._writers:
            writer = self._writers[rank] = RecordingWriter(
                self._target, run=self._content(None), rank=rank, world_size=self._run.world_size
            )
            self._stack.callback(writer.close)
            writer.write_rank(self._run.rank_content(rank))
        return self._writers[rank]

    def _open(self, directory: str) -> RecordingWriter:
        writer = RecordingWriter(self._target, run={}, world_size=self._run.world_size, directory=directory)
        self._stack.callback(writer.close)
        return writer

    def _content(self, endings: Mapping[str, Any] | None) -> dict[str, Any]:
        """Content of `run.json`."""
        return {**self._run.run, "compact": {"endings": endings}}


def _size_text(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB" if size >= 1e6 else f"{size / 1e3:.3g} kB"


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"
