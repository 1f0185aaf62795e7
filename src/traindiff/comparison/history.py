"""What a comparison keeps of every site in every step, for a report that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from traindiff.alignment.ranks import differences_by_rank
from traindiff.findings.finding import ratio_of
from traindiff.merging.distance import Pair
from traindiff.merging.history import History
from traindiff.merging.step_table import Entry, Key
from traindiff.summary import norm, number

FIELDS = ("ratio", "difference", "floor", "baseline", "candidate")
"""Numbers of a site in a step; the last two are the sizes of both sides: L2 norms, or of a single element its value."""

NOT_JUDGED = 1e-30
"""Ratio that stands for a difference whose floor is without bound: of several steps, it is kept before equal bits."""

MAX_RANKS = 16
"""Ranks that are kept one by one, the first of them; what others hold is part of the whole only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Farthest:
    """A site in the step in which its difference is largest, in units of its floor.

    Attributes:
        step: That step.
        ratio: Difference over floor in it.
        order: Place in the baseline's execution order, in the first step that has the site.
        dtypes: Of both sides.
        shapes: Of both sides.
        summaries: Of both sides.
    """

    step: int
    ratio: float
    order: int
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    summaries: tuple[Any, Any]


class DifferenceHistory:
    """Differences of all sites in all steps, in bounded memory.

    Attributes:
        whole: By site.
        by_rank: By site and rank, where several ranks of both runs hold the same parts; only the ratio.
        farthest: Each site where it is farthest from the baseline.
    """

    def __init__(self) -> None:
        self.whole: History[Key] = History(FIELDS)
        self.by_rank: History[tuple[Key, int]] = History(FIELDS[:1])
        self.farthest: dict[Key, Farthest] = {}

    def note(self, pair: Pair, step: int, size: float, floor: float) -> None:
        """Remember what was measured at a site.

        Args:
            pair: The site.
            step: Its step.
            size: Relative L2 difference; inf where it has no size.
            floor: The largest difference that would have been no finding.
        """
        key, ratio = pair.baseline.key, ratio_of(size, floor)
        judged = ratio > 0 or size == 0
        self.whole.note(
            key, step, (ratio if judged else NOT_JUDGED, size, floor, _size(pair.baseline), _size(pair.candidate))
        )
        held = self.farthest.get(key)
        if held is None or ratio > held.ratio:
            sides = (pair.baseline, pair.candidate)
            self.farthest[key] = Farthest(
                step=step,
                ratio=ratio,
                order=held.order if held else pair.baseline.order,  # orders of one step compare, of several need not
                dtypes=(pair.baseline.dtype, pair.candidate.dtype),
                shapes=(pair.baseline.shape, pair.candidate.shape),
                # Copies: a summary is a row of its step's array, and would keep it in memory.
                summaries=(np.array(sides[0].summary)[()], np.array(sides[1].summary)[()]),
            )
        if judged and len(pair.candidate.parts) > 1:
            for rank, apart in differences_by_rank(pair).items():
                if rank < MAX_RANKS:
                    self.by_rank.note((key, rank), step, (ratio_of(apart, floor),))


def _size(entry: Entry) -> float:
    if entry.shape == () and int(entry.summary["count"]) == 1:
        return number(entry.summary)
    return float(norm(entry.summary))
