"""The observations of a step by column, as they are written: few objects, whatever their number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from traindiff.core.observation import Observation

_make = Observation._make

Again = tuple[Observation, int, int, int, bool, int, int]
"""An observation like an earlier one: that one, its own step, micro-step, order, `scaled`, and evaluation; its row."""

_DIFFERING = tuple(map(Observation._fields.index, ("step", "micro_step", "order", "scaled", "evaluation")))


class ObservationTable(Sequence[Observation]):
    """A growing sequence of observations, each with the address of the row that has its summary.

    Both are added at once, so that several threads may add.

    Thousands of tuples in each step would keep the garbage collector busy, for longer than it takes to record them.
    """

    __slots__ = ("_again", "_blocks", "_places", "_rows")

    def __init__(self) -> None:
        self._blocks: list[Sequence[Sequence[Any]]] = []
        self._places: list[Sequence[int]] = []  # of the rows of each block
        self._rows: list[tuple[Observation, int]] = []  # those behind the blocks
        self._again: list[Again] = []  # those behind the rows

    def append(self, seen: Observation, place: int) -> None:
        """Add an observation."""
        if self._again:
            self._end_rows()
        self._rows.append((seen, place))

    def append_again(self, entry: Again) -> None:
        """Add an observation that is like an earlier one, which is quicker than to make another."""
        self._again.append(entry)

    def extend(self, columns: Sequence[Sequence[Any]], places: Sequence[int]) -> None:
        """Add several observations, given by a column for each field."""
        self._end_rows()
        self._add(columns, places)

    def columns(self) -> Sequence[Sequence[Any]]:
        """A column for each field of `Observation`."""
        self._end_rows()
        if not self._blocks:
            return ((),) * len(Observation._fields)
        return [tuple(chain.from_iterable(parts)) for parts in zip(*self._blocks, strict=True)]

    def places(self) -> list[int]:
        """The address of each row."""
        self._end_rows()
        return [*chain.from_iterable(self._places)]

    def __len__(self) -> int:
        return sum(map(len, self._places)) + len(self._rows) + len(self._again)

    def __iter__(self) -> Iterator[Observation]:
        self._end_rows()
        for block in self._blocks:
            yield from map(_make, zip(*block, strict=True))

    def __getitem__(self, place: Any) -> Any:
        return next(iter(self)) if place == 0 and len(self) else [*self][place]

    def _end_rows(self) -> None:
        rows, self._rows = self._rows, []
        again, self._again = self._again, []
        if rows:
            seen, places = zip(*rows, strict=True)
            self._add([*zip(*seen, strict=True)], places)
        if again:
            earlier, *differing, places = zip(*again, strict=True)
            columns: list[Sequence[Any]] = [*zip(*earlier, strict=True)]
            for place, column in zip(_DIFFERING, differing, strict=True):
                columns[place] = column
            self._add(columns, places)

    def _add(self, columns: Sequence[Sequence[Any]], places: Sequence[int]) -> None:
        self._blocks.append(columns)
        self._places.append(places)


def columns_of(observations: Sequence[Observation]) -> Sequence[Sequence[Any]]:
    """A column for each field of `Observation`."""
    if isinstance(observations, ObservationTable):
        return observations.columns()
    return [*zip(*observations, strict=True)] if observations else ((),) * len(Observation._fields)
