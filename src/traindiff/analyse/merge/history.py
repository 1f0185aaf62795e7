"""Numbers of every site over the steps, in bounded memory, for the figures of reports."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.findings import SITE_WORDS, SiteWord, ratio_of
from traindiff.analyse.merge.distance import Pair, differences_by_rank
from traindiff.analyse.merge.site import GRADIENT_NORM, MergedSite, SiteKey, StepTable, gradient_norm
from traindiff.core.observation import SAMPLE
from traindiff.core.summary import UNIT_ROUNDOFF, largest, nonfinite_count, norm_of, number

MAX_CELLS = 1 << 21
"""Limit of sites times columns: 2 million take 8 MB for each number."""

MIN_COLUMNS = 64
"""Columns that are kept for any number of sites."""

MAX_COLUMNS = 2048
"""Largest number of columns: more than a screen has."""

Site = TypeVar("Site", bound=Hashable)
"""Key of a row."""


class History(Generic[Site]):
    """Numbers of sites by step. If there are too many steps, several share a column.

    In a shared column, each site keeps the step whose first number is largest. Memory does not grow with the number of
    steps: there are at most `MAX_CELLS` cells, or `MIN_COLUMNS` for each site if that is more.

    Attributes:
        fields: Names of the numbers of a cell.
        sites: Row of each site, in the order in which they were first noted.
        width: Largest number of steps in a column.
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
        """The numbers, `(sites, columns, fields)`; NaN where a site was not noted."""
        return self._cells[: len(self.sites), : len(self._first)]

    def of(self, field: str) -> NDArray[np.float32]:
        """One of the fields of all cells, `(sites, columns)`."""
        return np.asarray(self.cells[:, :, self.fields.index(field)])

    def note(self, site: Site, step: int, numbers: Sequence[float]) -> bool:
        """Remember the numbers of a site in a step.

        Args:
            site: Its key.
            step: Number of the step; ascending, except between several optimizers.
            numbers: One for each of `fields`. The first must not be NaN: the largest of a column is kept.

        Returns:
            Whether they are kept for now.
        """
        row = self.sites.setdefault(site, len(self.sites))
        self._begin(step)
        self._make_room()
        cell = self._cells[row, self.column_of(step)]
        if float(cell[0]) >= numbers[0]:  # false for NaN, i.e. if nothing was noted
            return False
        with np.errstate(over="ignore"):  # a figure may show infinity for numbers beyond float32
            cell[:] = numbers
        return True

    def column_of(self, step: int) -> int:
        """The column that holds a step, or the one before it."""
        return max(0, bisect_right(self._first, step) - 1)

    def _begin(self, step: int) -> None:
        """Start a new column for a step after all others, if the last column is full."""
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
        """Join each two neighboring columns."""
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


RUN_FIELDS = ("order", "size", "largest", "zero", "nonfinite")
"""Numbers of a site in a step: `order` decides which step of a column is kept (the L2 norm, inf if not finite); then
the norm (of a single element its value), the largest |x|, and the shares of zeros and of non-finite elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extreme:
    """A site in the step in which its norm is largest, or in the first in which it is not finite.

    Attributes:
        step: That step.
        size: Its norm; inf if it is not finite.
        order: Place in execution order, in the first step that has the site.
        dtype: Of the tensor.
        shape: Of the tensor.
        summary: Of the tensor.
    """

    step: int
    size: float
    order: int
    dtype: str
    shape: tuple[int, ...]
    summary: Any


class RunHistory:
    """Sizes of all sites of one run (`whole`), and each site in the step in which it is largest (`extremes`)."""

    def __init__(self) -> None:
        self.whole: History[SiteKey] = History(RUN_FIELDS)
        self.extremes: dict[SiteKey, Extreme] = {}

    def note(self, table: StepTable, step: int) -> None:
        """Remember a step: all floating-point sites, and the norm of all gradients."""
        gradients = [
            entry
            for key, entry in table.items()
            if key.phase == "grad" and key.slot == "grad" and not key.stage and not entry.unobserved
        ]
        if gradients:
            self._site(GRADIENT_NORM, gradient_norm(gradients), step)
        for key, entry in table.items():
            if not entry.unobserved and key.stage != SAMPLE and entry.dtype in UNIT_ROUNDOFF:
                self._site(key, entry, step)

    def _site(self, key: SiteKey, entry: MergedSite, step: int) -> None:
        summary, size = entry.summary, _size(entry)
        count = int(summary["count"])
        bad = int(nonfinite_count(summary))
        place = math.inf if bad or math.isnan(size) else abs(size)
        zero = int(summary["zero"]) / count if count else 0.0
        self.whole.note(key, step, (place, size, float(largest(summary)), zero, bad / count if count else 0.0))
        held = self.extremes.get(key)
        if held is None or place > held.size:
            self.extremes[key] = Extreme(
                step=step,
                size=place,
                order=held.order if held else entry.order,  # orders of different steps are not comparable
                dtype=entry.dtype,
                shape=entry.shape,
                summary=np.array(summary)[()],  # a copy: a summary would keep its step's array in memory
            )


DIFFERENCE_FIELDS = ("weight", "difference", "floor", "baseline", "candidate")
"""Numbers of a site in a step: `weight` decides which step of a column is kept, and its whole part is the place of the
site's word in `SITE_WORDS`; the last two are the sizes of both sides: L2 norms, or the values of single elements."""


def weight_of(word: SiteWord, ratio: float) -> float:
    """A number that is larger for a later word, and for a larger ratio within one word."""
    share = 1.0 if math.isinf(ratio) else ratio / (1.0 + ratio)
    return SITE_WORDS.index(word) + 0.9 * share


MAX_RANKS = 16
"""Number of ranks that are kept one by one. Further ranks are only part of the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Farthest:
    """A site in the step in which its difference weighs most.

    Attributes:
        step: That step.
        weight: How much the difference weighs in it; see `weight_of`.
        order: Place in the baseline's execution order, in the first step that has the site.
        dtypes: Of both sides.
        shapes: Of both sides.
        summaries: Of both sides.
    """

    step: int
    weight: float
    order: int
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    summaries: tuple[Any, Any]


class DifferenceHistory:
    """Differences of all sites in all steps, in bounded memory.

    Attributes:
        whole: By site.
        by_rank: The ratio by site and rank, if several ranks of both runs hold the same parts.
        farthest: Each site where it is farthest from the baseline.
    """

    def __init__(self) -> None:
        self.whole: History[SiteKey] = History(DIFFERENCE_FIELDS)
        self.by_rank: History[tuple[SiteKey, int]] = History(("ratio",))
        self.farthest: dict[SiteKey, Farthest] = {}

    def note(self, pair: Pair, step: int, size: float, floor: float, word: SiteWord) -> None:
        """Remember the relative L2 difference (inf without a size), the floor and the word of a site in a step."""
        key, weight = pair.baseline.key, weight_of(word, ratio_of(size, floor))
        self.whole.note(key, step, (weight, size, floor, _size(pair.baseline), _size(pair.candidate)))
        held = self.farthest.get(key)
        if held is None or weight > held.weight:
            sides = (pair.baseline, pair.candidate)
            self.farthest[key] = Farthest(
                step=step,
                weight=weight,
                order=held.order if held else pair.baseline.order,  # orders of different steps are not comparable
                dtypes=(pair.baseline.dtype, pair.candidate.dtype),
                shapes=(pair.baseline.shape, pair.candidate.shape),
                # Copies: a summary is a row of its step's array, and would keep it in memory.
                summaries=(np.array(sides[0].summary)[()], np.array(sides[1].summary)[()]),
            )
        if (size == 0.0 or not math.isinf(floor)) and len(pair.candidate.parts) > 1:
            for rank, apart in differences_by_rank(pair).items():
                if rank < MAX_RANKS:
                    self.by_rank.note((key, rank), step, (ratio_of(apart, floor),))


def _size(entry: MergedSite) -> float:
    if entry.shape == () and int(entry.summary["count"]) == 1:
        return number(entry.summary)
    return norm_of(entry.summary)
