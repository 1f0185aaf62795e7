"""Write the files of one rank's steps."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from traindiff.interop.msprobe import tables
from traindiff.interop.msprobe.gradients import WholeGradient
from traindiff.interop.msprobe.layout import direction_file, put, summary_file
from traindiff.interop.msprobe.tables import Columns, Row


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
        return gradient.row(self._columns, name=name)
