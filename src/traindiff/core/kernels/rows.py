"""The summaries of a step: those that are there, and those that a GPU is still computing."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.summary import SUMMARY, Summaries

if TYPE_CHECKING:
    from traindiff.core.kernels.gpu.rows import Ticket


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


ROW_BYTES = SUMMARY.itemsize
_FEWEST_ROWS, _MOST_ROWS = 64, 4096


class Rows:
    """Memory for the summaries of a step, to which kernels write directly.

    A row counts when its address is among those that `taken` is given. So what happens between placing a row and
    noting its observation, on this thread or on another, makes no other row stand for that observation.

    Args:
        expected: The number of rows that will probably come.
    """

    __slots__ = ("_deferred", "_end", "_expected", "_late", "_next", "_tables")

    def __init__(self, expected: int = 0) -> None:
        self._expected = expected
        self._tables: list[tuple[int, Summaries]] = []  # with their addresses
        self._next = self._end = 0  # addresses in the latest table
        self._deferred: dict[int, Deferred] = {}  # by address
        self._late: list[tuple[NDArray[np.int64], Ticket, NDArray[np.int64]]] = []  # addresses, and where they arrive

    def place(self, count: int = 1) -> int:
        """The address of so many further rows, one after the other, which the caller fills."""
        place, size = self._next, count * ROW_BYTES
        if place + size > self._end:
            return self._place_in_new_table(count)
        self._next = place + size  # nothing is called since `_next` was read, so no thread comes in between
        return place

    def append(self, summary: Any) -> int:
        """Add a summary, or a `Deferred`; returns the address of its row."""
        place = self.place()
        if isinstance(summary, Deferred):
            self._deferred[place] = summary
        else:
            ctypes.memmove(place, summary.tobytes(), ROW_BYTES)
        return place

    def arrive_with(self, ticket: Ticket, slots: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Set where rows that were placed will arrive: rows of a ticket.

        Args:
            ticket: Gives them when its step has ended.
            slots: Their numbers in it, int64.
            places: Their addresses here, as many.
        """
        self._late.append((places, ticket, slots))

    def arrives_as(self, place: int, summary: Deferred) -> None:
        """Set that a row that was placed is a `Deferred`."""
        self._deferred[place] = summary

    def taken(self, places: Sequence[int]) -> TakenRows:
        """The rows at these addresses, which are different ones."""
        deferred = {**self._deferred}
        for late, ticket, slots in self._late:
            for place, slot in zip(late.tolist(), slots.tolist(), strict=True):
                deferred[place] = Deferred()
                deferred[place].arrives_with(ticket, slot)
        at = np.array(places, dtype=np.int64)
        rows = {place: row for row, place in enumerate(places) if place in deferred} if deferred else {}
        return TakenRows(self._tables, at, {row: deferred[place] for place, row in rows.items()})

    def _place_in_new_table(self, count: int) -> int:
        with _growing:
            if self._next + count * ROW_BYTES > self._end:  # no other thread has begun one meanwhile
                held = sum(len(table) for _, table in self._tables)
                usual = min(held, _MOST_ROWS) if held else self._expected
                table = np.empty(max(count, usual, _FEWEST_ROWS), SUMMARY)
                first, end = int(table.ctypes.data), int(table.ctypes.data) + table.nbytes
                self._tables.append((first, table))
                self._next, self._end = first, end
            place = self._next
            self._next = place + count * ROW_BYTES
        return place


_growing = threading.Lock()


class TakenRows(Sequence[Any]):
    """Some of the rows of a step: each a summary, or a `Deferred`.

    Args:
        tables: The memory, with addresses.
        places: Addresses of the rows, int64.
        deferred: What a GPU is still computing, by number of the row.
    """

    __slots__ = ("_deferred", "_places", "_tables")

    def __init__(
        self, tables: Sequence[tuple[int, Summaries]], places: NDArray[np.int64], deferred: Mapping[int, Deferred]
    ) -> None:
        self._tables = tables
        self._places = places
        self._deferred = deferred

    @property
    def is_late(self) -> bool:
        """True if a device is still computing some of them."""
        return bool(self._deferred)

    def result(self) -> Summaries:
        """All of them; waits for those that are `Deferred`."""
        found = self._there()
        for row, one in self._deferred.items():
            found[row] = one.result()
        return found

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, row: Any) -> Any:
        return [*self][row]

    def __iter__(self) -> Iterator[Any]:
        for row, summary in enumerate(self._there()):
            yield self._deferred.get(row, summary)

    def _there(self) -> Summaries:
        """The rows as far as they are there."""
        for first, table in self._tables:  # as a rule one table holds them, in their order
            if len(self) <= len(table) and np.array_equal(self._places, first + ROW_BYTES * np.arange(len(self))):
                return table[: len(self)]
        found = np.empty(len(self), SUMMARY)
        for first, table in self._tables:
            here = (self._places >= first) & (self._places < first + table.nbytes)
            found[here] = table[(self._places[here] - first) // ROW_BYTES]
        return found


def resolved(summaries: Sequence[Any]) -> Summaries:
    """One array of summaries; waits for those that are `Deferred`. Any thread may call it."""
    if isinstance(summaries, TakenRows):
        return summaries.result()
    return np.array([one.result() if isinstance(one, Deferred) else one for one in summaries], dtype=SUMMARY)


def is_late(summaries: Sequence[Any]) -> bool:
    """True if a device is still computing some of the summaries."""
    return (
        summaries.is_late if isinstance(summaries, TakenRows) else any(isinstance(one, Deferred) for one in summaries)
    )
