"""Numbers of every site over the steps, in bounded memory: what a report draws."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

MAX_CELLS = 1 << 21
"""Sites times columns that are kept: 2 million take 8 MB for each number."""

MIN_COLUMNS = 64
"""Columns that are kept however many sites there are."""

MAX_COLUMNS = 2048
"""Columns that are kept however few sites there are: more than a screen has."""


Site = TypeVar("Site", bound=Hashable)
"""What identifies a row."""


class History(Generic[Site]):
    """Numbers of sites, one column for each step, or for several once there are too many to keep them all.

    Of the steps of one column each site keeps the one whose first number is largest. Memory does not grow with steps:
    there are `MAX_CELLS` cells at most, or `MIN_COLUMNS` for each site if that is more.

    Args:
        fields: Names of the numbers of a cell.

    Attributes:
        fields: The same.
        sites: Row of each site, in the order in which they were first noted.
        width: Steps in a column, at most.
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self.fields = tuple(fields)
        self.sites: dict[Site, int] = {}
        self.width = 1
        self._first: list[int] = []
        self._last: list[int] = []
        self._counts: list[int] = []
        self._cells: NDArray[np.float32] = np.full((16, 16, len(self.fields)), np.nan, dtype=np.float32)

    @property
    def columns(self) -> list[tuple[int, int]]:
        """First and last step of each column."""
        return list(zip(self._first, self._last, strict=True))

    @property
    def cells(self) -> NDArray[np.float32]:
        """The numbers, `(sites, columns, fields)`; NaN throughout where a site was not noted."""
        return self._cells[: len(self.sites), : len(self._first)]

    def of(self, field: str) -> NDArray[np.float32]:
        """One number of all cells, `(sites, columns)`.

        Args:
            field: One of `fields`.
        """
        return np.asarray(self.cells[:, :, self.fields.index(field)])

    def note(self, site: Site, step: int, numbers: Sequence[float]) -> bool:
        """Remember the numbers of a site in a step.

        Args:
            site: What identifies it.
            step: Its number; steps ascend, but for those of several optimizers.
            numbers: One for each of `fields`. The first must not be NaN: the largest of a column is kept.

        Returns:
            Whether they are kept for now.
        """
        row = self.sites.setdefault(site, len(self.sites))
        self._begin(step)
        self._make_room()
        cell = self._cells[row, self.column_of(step)]
        if float(cell[0]) >= numbers[0]:  # false where nothing was noted
            return False
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite on a picture
            cell[:] = numbers
        return True

    def column_of(self, step: int) -> int:
        """The column that holds a step, or the one before it.

        Args:
            step: Its number.
        """
        return max(0, bisect_right(self._first, step) - 1)

    def _begin(self, step: int) -> None:
        """Make a column for a step that is later than all others, where the last is full."""
        if self._first and step <= self._last[-1]:
            return
        if self._first and self._counts[-1] < self.width:
            self._last[-1], self._counts[-1] = step, self._counts[-1] + 1
        else:
            self._first.append(step)
            self._last.append(step)
            self._counts.append(1)

    def _make_room(self) -> None:
        while len(self._first) > self._most_columns():
            self._fold()
        rows, columns, fields = self._cells.shape
        needed = (len(self.sites), len(self._first))
        if needed[0] > rows or needed[1] > columns:
            wanted = [
                have if need <= have else max(need, 2 * have)
                for need, have in zip(needed, (rows, columns), strict=True)
            ]
            larger = np.full((*wanted, fields), np.nan, dtype=np.float32)
            larger[:rows, :columns] = self._cells
            self._cells = larger

    def _most_columns(self) -> int:
        return min(MAX_COLUMNS, max(MIN_COLUMNS, MAX_CELLS // len(self.sites)))

    def _fold(self) -> None:
        """Make one column of every two."""
        count = len(self._first)
        pairs = np.full((len(self._cells), 2 * (-(-count // 2)), len(self.fields)), np.nan, dtype=np.float32)
        kept = min(count, self._cells.shape[1])
        pairs[:, :kept] = self._cells[:, :kept]
        even, odd = pairs[:, 0::2], pairs[:, 1::2]
        later = np.isnan(even[..., 0]) | (odd[..., 0] > even[..., 0])
        self._cells = np.where(later[..., None], odd, even)
        self._first, self._last = self._first[0::2], [*self._last[1::2], *self._last[count - 1 :][: count % 2]]
        self._counts = [sum(self._counts[start : start + 2]) for start in range(0, count, 2)]
        self.width *= 2
