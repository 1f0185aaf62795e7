"""The observations of a step by column, as they are written: few objects, whatever their number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from traindiff.core.observation import Observation

_make = Observation._make

Again = tuple[Observation, int, int, int, bool, int]
"""An observation like an earlier one: that one, and its own step, micro-step, order, `scaled`, and evaluation."""

_DIFFERING = tuple(map(Observation._fields.index, ("step", "micro_step", "order", "scaled", "evaluation")))


class ObservationTable(Sequence[Observation]):
    """A growing sequence of observations.

    Thousands of tuples in each step would keep the garbage collector busy, for longer than it takes to record them.
    """

    __slots__ = ("_again", "_blocks", "_length", "_rows")

    def __init__(self) -> None:
        self._blocks: list[Sequence[Sequence[Any]]] = []
        self._rows: list[Observation] = []  # those behind the blocks
        self._again: list[Again] = []  # those behind the rows
        self._length = 0

    def append(self, seen: Observation) -> None:
        """Add an observation."""
        if self._again:
            self._end_rows()
        self._rows.append(seen)
        self._length += 1

    def append_again(self, entry: Again) -> None:
        """Add an observation that is like an earlier one, which is quicker than to make another."""
        self._again.append(entry)
        self._length += 1

    def extend(self, columns: Sequence[Sequence[Any]]) -> None:
        """Add several observations, given by a column for each field."""
        self._end_rows()
        self._blocks.append(columns)
        self._length += len(columns[0])

    def columns(self) -> Sequence[Sequence[Any]]:
        """A column for each field of `Observation`."""
        self._end_rows()
        if not self._blocks:
            return ((),) * len(Observation._fields)
        return [tuple(chain.from_iterable(parts)) for parts in zip(*self._blocks, strict=True)]

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Observation]:
        self._end_rows()
        for block in self._blocks:
            yield from map(_make, zip(*block, strict=True))

    def __getitem__(self, place: Any) -> Any:
        return next(iter(self)) if place == 0 and self._length else [*self][place]

    def _end_rows(self) -> None:
        if self._rows:
            self._blocks.append([*zip(*self._rows, strict=True)])
            self._rows = []
        if self._again:
            earlier, *differing = zip(*self._again, strict=True)
            columns: list[Sequence[Any]] = [*zip(*earlier, strict=True)]
            for place, column in zip(_DIFFERING, differing, strict=True):
                columns[place] = column
            self._blocks.append(columns)
            self._again = []


def columns_of(observations: Sequence[Observation]) -> Sequence[Sequence[Any]]:
    """A column for each field of `Observation`."""
    if isinstance(observations, ObservationTable):
        return observations.columns()
    return [*zip(*observations, strict=True)] if observations else ((),) * len(Observation._fields)
