"""The summaries of a step: those that are there, and those that a GPU is still computing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.summary import SUMMARY, Summaries, empty

if TYPE_CHECKING:
    from traindiff.core.kernels.gpu.rows import Ticket

_NOTHING = empty()


class Deferred:
    """A summary that a GPU is still computing."""

    __slots__ = ("_slot", "_ticket")

    def __init__(self) -> None:
        self._ticket: Ticket | None = None
        self._slot = 0

    def arrives_with(self, ticket: Ticket, slot: int) -> None:
        """Set where the summary will arrive: a row of a ticket."""
        self._ticket, self._slot = ticket, slot

    def result(self) -> np.void:
        """The summary; waits for the device if it is not finished."""
        assert self._ticket is not None
        found: np.void = self._ticket.result()[self._slot]
        return found


_ROW_BYTES = SUMMARY.itemsize
_FEWEST_ROWS, _MOST_ROWS = 64, 4096


class Rows(Sequence[Any]):
    """The summaries of a step, one after the other in memory to which kernels write directly.

    As a sequence it has one entry per observation: the summary, or a `Deferred`.

    Args:
        expected: The number of rows that will probably come.
    """

    __slots__ = ("_deferred", "_end", "_expected", "_late", "_length", "_next", "_table", "_tables")

    def __init__(self, expected: int = 0) -> None:
        self._expected = expected
        self._tables: list[Summaries] = []
        self._table = np.empty(0, SUMMARY)
        self._next = self._end = 0  # addresses in the latest table
        self._length = 0
        self._deferred: dict[int, Deferred] = {}
        self._late: list[tuple[NDArray[np.int64], Ticket, NDArray[np.int64]]] = []  # rows, and where they arrive

    def place(self, count: int = 1) -> int:
        """The address of so many further rows, which the caller fills."""
        place, size = self._next, count * _ROW_BYTES
        if place + size > self._end:
            self._begin_table(count)
            place = self._next
        self._next = place + size
        self._length += count
        return place

    def append(self, summary: Any) -> None:
        """Add a summary, or a `Deferred`."""
        is_late = isinstance(summary, Deferred)
        if is_late:
            self._deferred[self._length] = summary
        self.place()
        self._table[self._num_used - 1] = _NOTHING if is_late else summary

    def arrive_with(self, ticket: Ticket, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Set where rows that were placed will arrive: rows of a ticket.

        Args:
            ticket: Gives them when its step has ended.
            slots: Their numbers in it, int64.
            rows: Their numbers here, as many.
        """
        self._late.append((rows, ticket, slots))

    def arrives_as(self, row: int, summary: Deferred) -> None:
        """Set that a row that was placed is a `Deferred`."""
        self._deferred[row] = summary

    @property
    def is_late(self) -> bool:
        """True if a device is still computing some of them."""
        return bool(self._deferred or self._late)

    def result(self) -> Summaries:
        """All of them; waits for those that are `Deferred`."""
        parts = self._parts()
        found: Summaries = parts[0] if len(parts) == 1 else np.concatenate(parts)
        for row, one in self._deferred.items():
            found[row] = one.result()
        for rows, ticket, slots in self._late:
            found[rows] = ticket.result()[slots]
        return found

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: Any) -> Any:
        return [*self][row]

    def __iter__(self) -> Iterator[Any]:
        deferred = {**self._deferred}
        for rows, ticket, slots in self._late:
            for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
                deferred[row] = Deferred()
                deferred[row].arrives_with(ticket, slot)
        for row, summary in enumerate(chain.from_iterable(self._parts())):
            yield deferred.get(row, summary)

    @property
    def _num_used(self) -> int:
        return len(self._table) - (self._end - self._next) // _ROW_BYTES

    def _parts(self) -> list[Summaries]:
        return [*self._tables, self._table[: self._num_used]]

    def _begin_table(self, count: int) -> None:
        if self._num_used:
            self._tables.append(self._table[: self._num_used])
        usual = self._expected if not self._length else min(self._length, _MOST_ROWS)
        self._table = np.empty(max(count, usual, _FEWEST_ROWS), SUMMARY)
        self._next = int(self._table.ctypes.data)
        self._end = self._next + self._table.nbytes


def resolved(summaries: Sequence[Any]) -> Summaries:
    """One array of summaries; waits for those that are `Deferred`. Any thread may call it."""
    if isinstance(summaries, Rows):
        return summaries.result()
    return np.array([one.result() if isinstance(one, Deferred) else one for one in summaries], dtype=SUMMARY)


def is_late(summaries: Sequence[Any]) -> bool:
    """True if a device is still computing some of the summaries."""
    return summaries.is_late if isinstance(summaries, Rows) else any(isinstance(one, Deferred) for one in summaries)
