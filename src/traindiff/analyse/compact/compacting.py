"""`traindiff compact`: a recording whose ranks are merged once, step by step."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from traindiff.analyse.compact.merged_rows import RowMaker, Rows, Unmergeable
from traindiff.analyse.merge.merged_tables import MergedTables
from traindiff.analyse.merge.placed_parts import PlacedParts, places_of
from traindiff.analyse.merge.rank_codes import num_bits
from traindiff.analyse.merge.rank_steps import rank_steps
from traindiff.analyse.merge.run_steps import RunStep, StepMerger
from traindiff.analyse.merge.site import NAMES, MergedSite, StepTable
from traindiff.analyse.products import product_checks
from traindiff.analyse.rules.products import ROW, WHOLE
from traindiff.core.summary import empty
from traindiff.errors import ConfigError, CorruptRecordingError, Problem
from traindiff.storage import Recording, RecordingWriter, StepObservations, open_recording
from traindiff.storage.location import MERGED, PLACES
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
    """

    recording: str
    output: str
    ranks: int
    steps: int
    whole: Mapping[str, int]
    bytes_before: int | None
    bytes_after: int

    def __str__(self) -> str:
        before = f"{_size_text(self.bytes_before)} are now " if self.bytes_before is not None else ""
        size = f"{before}{_size_text(self.bytes_after)}"
        per = self.bytes_after / max(1, self.ranks * self.steps) / 1000.0
        lines = [f"{self.output}: {_count(self.steps, 'step')} of {_count(self.ranks, 'rank')}; {size}, {per:.2g} kB "
                 "per rank and step."]  # fmt: skip
        lines += [f"{_count(number, 'step')} stored rank by rank: {reason}." for reason, number in self.whole.items()]
        return "\n".join(lines)


ASKED = "asked for with --whole-every"
INCOMPLETE = "some ranks lack the step, or end in it or before it"
PARTS = "parts of the step are never merged (operators, products, several evaluations of the loss)"
OTHER = "merged rows cannot say all of it"


def compact(
    recording: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    whole_every: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Compacted:
    """Merge the ranks of a recording once, into a smaller one of which everything else can be asked as before.

    Args:
        recording: The recording; it is only read. One that is compact already may be given.
        output: Path of the smaller one. It is there when all of it has been written.
        whole_every: Also keep every n-th step rank by rank, if the recording has it so.
        progress: Called with the number of each step.

    Returns:
        What was made; `print` it.

    Raises:
        ConfigError: There is something at `output`, or the recording holds what cannot be merged.
        RecordingError: The recording cannot be used.
    """
    run = open_recording(os.fspath(recording))
    target = Path(output)
    if problems := _problems(run, os.fspath(output), whole_every):
        raise ConfigError("traindiff compact", problems, consequence="nothing was written")
    unfinished = target.with_name(f"{target.name}.unfinished-{os.getpid()}")
    try:
        with _Compacting(run, unfinished, whole_every) as compacting:
            for step in compacting.run():
                if progress:
                    progress(step)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Compacted(
        recording=run.path, output=str(target), ranks=len(run.ranks), steps=compacting.num_steps,
        whole=dict(compacting.whole), bytes_before=_size_bytes(Path(recording)) or None,
        bytes_after=_size_bytes(target),
    )  # fmt: skip


def _problems(run: Recording, target: str, whole_every: int | None) -> list[Problem]:
    problems = []
    if protocol_of(target):
        fix = "Give the path of a local directory (-o), and copy it to the store."
        problems.append(Problem(where=target, what="is no path on this machine.", fix=fix))
    elif os.path.lexists(target):
        fix = "Give the path of a directory that does not exist yet."
        problems.append(Problem(where=target, what="is there already.", fix=fix))
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
    """Writes a compact recording. To be used in a `with` statement."""

    def __init__(self, run: Recording, target: Path, whole_every: int | None) -> None:
        self.whole: Counter[str] = Counter()
        self.num_steps = 0
        self._run = run
        self._target = str(target)
        self._whole_every = whole_every
        self._stack = ExitStack()
        self._writers: dict[int, RecordingWriter] = {}
        self._lead = min(run.ranks)
        self._merger = StepMerger(run)
        self._described = {rank: run.rank_content(rank).get("products", {}) for rank in run.ranks}
        statuses = [run.status(rank) for rank in run.ranks]
        self._endings = {str(one.rank): {"ending": one.ending, "message": one.message} for one in statuses
                         if one.ending != "closed"}  # fmt: skip
        lasts = [run.last_step(one.rank) for one in statuses if one.ending != "closed"]
        self._tail = min((-1 if last is None else last for last in lasts), default=None)

    def __enter__(self) -> _Compacting:
        self._of_rank(self._lead)
        self._merged = self._open(MERGED)
        places = self._open(PLACES)
        self._places = PlaceWriter(places)
        self._maker = RowMaker(self._places, num_bits(self._run.world_size))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> Iterator[int]:
        """Write all steps, and yield the number of each."""
        for of_ranks in rank_steps(self._run):
            step = self._merger.merged(of_ranks)
            self._write(step, of_ranks)
            self.num_steps += 1
            yield step.step
            of_ranks.clear()
            step.release()
        for rank in self._run.ranks:
            self._of_rank(rank)
            if rank != self._lead:
                self._writers.pop(rank).close()
        self._writers[self._lead].write_run(self._content(self._endings))
        self._writers[self._lead].close()
        self._merged.close()

    def _write(self, step: RunStep, of_ranks: Sequence[StepObservations]) -> None:
        is_merged = of_ranks[0].places is not None
        reason = "" if is_merged else self._reason(step, of_ranks)
        rows = None if reason else self._rows(step)
        if rows is not None:
            self._merged.write_step(rows.observations, rows.numbers)
            return
        assert not is_merged, "a step that was merged can be merged again"
        self.whole[reason or OTHER] += 1
        for one in of_ranks:
            if one.observations:
                self._of_rank(one.rank).write_step(one.observations, one.summaries)
        self._merged.write_step([whole_mark(step.optimizer, step.step)], empty(1))

    def _reason(self, step: RunStep, of_ranks: Sequence[StepObservations]) -> str:
        """Why a step is stored rank by rank; empty if its ranks are merged."""
        if self._whole_every is not None and step.step % self._whole_every == 0:
            return ASKED
        ends = self._tail is not None and step.step >= self._tail
        if ends or not step.finished or len(of_ranks) < len(self._run.ranks):
            return INCOMPLETE
        if step.earlier or step.operators or step.without_idle is not None or self._has_wrong_products(step):
            return PARTS
        return ""

    def _has_wrong_products(self, step: RunStep) -> bool:
        """True if checks of products are to be kept: of operators all, of layers those that are not clearly right."""
        checks = product_checks(step.products, self._described)
        return any(
            not one.is_of_layer or one.not_judged or one.residual > ROW / 2.0 or one.ratio > WHOLE / 2.0
            for one in checks
        )  # half of the rules' limits, as strict as comparisons are

    def _rows(self, step: RunStep) -> Rows | None:
        """The rows of a step; None if they do not say all of it."""
        try:
            rows = self._maker.rows(step.table, optimizer=step.optimizer, step=step.step)
        except Unmergeable:
            return None
        read = StepObservations(
            rank=self._lead, optimizer=step.optimizer, step=step.step, observations=rows.observations,
            summaries=rows.numbers, places=self._places,
        )  # fmt: skip
        world_size = self._run.world_size
        try:
            found = MergedTables(world_size, num_bits(world_size), self._target).table(read)
        except CorruptRecordingError:  # a reader would refuse them
            return None
        return rows if rows.observations and says_the_same(step.table, found) else None

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


def says_the_same(expected: StepTable, found: StepTable) -> bool:
    """True if two tables are the same: their sites in order, all that is known of them, and the parts that are kept."""
    if list(expected) != list(found):
        return False
    return all(_same(expected[key], found[key]) for key in expected)


_COMPARED = tuple(name for name in NAMES if name not in ("summary", "parts", "abridged"))


def _same(expected: MergedSite, found: MergedSite) -> bool:
    if any(getattr(expected, name) != getattr(found, name) for name in _COMPARED):
        return False
    if _bytes(expected.summary) != _bytes(found.summary):
        return False
    if not isinstance(found.parts, PlacedParts) or (not found.parts.are_known and found.abridged is None):
        return False
    places = tuple((part.micro_step, part.rank, part.shard, part.term) for part in places_of(expected.parts))
    if places != tuple(found.parts.places):
        return False
    known = ((expected.parts[at].summary, summary) for at, summary in found.parts.known.items())
    return all(one is not None and _bytes(one) == _bytes(other) for one, other in known)


def _bytes(summary: Any) -> bytes:
    return bytes(np.asarray(summary).tobytes())


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _size_text(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB" if size >= 1e6 else f"{size / 1e3:.3g} kB"


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"
