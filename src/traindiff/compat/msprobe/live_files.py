"""msprobe's files of a training that runs, written step by step behind its recording."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from traindiff.analyse.signs.run_signs import Stored
from traindiff.compat.msprobe import tables
from traindiff.compat.msprobe.gradients import (
    Kept,
    WholeGradient,
    concerns_gradients,
    is_gradient,
    is_whole,
    whole_gradients,
)
from traindiff.compat.msprobe.layout import direction_file, put, summary_file
from traindiff.compat.msprobe.tables import Columns, Row
from traindiff.core.observation import Observation
from traindiff.core.summary import Detail, Summaries


class StepFiles:
    """Writes the table and the directions of each step of a rank, each file at once.

    Steps are counted per optimizer. What several optimizers were given in their steps of one number is in one table.

    Args:
        directory: Of the rank.
        columns: Of the tables.
        names: What parameters are called in the files, by canonical path; those that are not there, by their path.
    """

    def __init__(self, directory: Path, columns: Columns, names: Mapping[str, str]) -> None:
        self._directory = directory
        self._columns = columns
        self._names = names
        self._written: set[int] = set()

    def write(self, step: int, gradients: Iterable[WholeGradient]) -> int:
        """Write what is there of a step; returns how many gradients that were."""
        rows = [self._row(step, gradient) for gradient in gradients]
        if not rows:
            return 0
        path = summary_file(self._directory, step)
        earlier: tuple[Row, ...] = ()
        if step in self._written:
            earlier = tables.load(path.read_bytes(), where=str(path)).rows
        put(path, tables.dump(self._columns, [*earlier, *rows]))
        self._written.add(step)
        return len(rows)

    def _row(self, step: int, gradient: WholeGradient) -> Row:
        name = self._names.get(gradient.path, gradient.path)
        if gradient.signs is not None:
            content = io.BytesIO()
            np.save(content, gradient.signs.positive.reshape(gradient.shape), allow_pickle=False)
            put(direction_file(self._directory, step, name), content.getvalue())
        return gradient.row(self._columns, name)


class LiveFiles:
    """Writes what one rank holds whole; see `traindiff.observe.common.writing.Follower`.

    Args:
        files: Of the rank.
        rank: Its number.
        bounds: Of the intervals that are counted.

    Attributes:
        partial: Parameters of which this rank holds a part only, by canonical path.
        seen: Whether there was anything: a gradient, or the reason why there is none.
    """

    def __init__(self, files: StepFiles, *, rank: int, bounds: tuple[float, ...]) -> None:
        self.partial: dict[str, None] = {}
        self.seen = False
        self._files = files
        self._rank = rank
        self._bounds = bounds

    def write_step(
        self, observations: Sequence[Observation], summaries: Summaries, details: Mapping[int, Detail]
    ) -> None:
        """Write a step, or a further part of it."""
        self.seen = self.seen or bool(observations)
        kept = []
        for row, seen in enumerate(observations):
            if not concerns_gradients(seen):
                continue
            if is_gradient(seen) and not is_whole(seen):
                self.partial[seen.path] = None
                continue
            read = partial(_stored, details.get(row))
            kept.append(Kept(seen=seen, rank=self._rank, summary=summaries[row], read=read))
        if kept:
            self._files.write(kept[0].seen.step, whole_gradients(kept, self._bounds))


def _stored(detail: Detail | None) -> Stored:
    """What a recording keeps of an observation, without the way over its file."""
    tensors = {} if detail is None else detail.tensors
    return {name: np.frombuffer(one.data, dtype=one.dtype).reshape(one.shape) for name, one in tensors.items()}
