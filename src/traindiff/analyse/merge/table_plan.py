"""How the observations of a step become its table, worked out once for all steps with the same observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from traindiff.analyse.merge.idle_passes import without_idle
from traindiff.analyse.merge.site import NAMES, MergedSite, Part, RankPart, SiteKey, filled
from traindiff.analyse.merge.step_table import Gaps, merged_site, scaled_rows, site_key
from traindiff.core.observation import (
    CLEARED,
    LOSS_SCALE,
    OPERATOR_STAGES,
    PRODUCT_STAGES,
    Observation,
    is_of_evaluation,
)
from traindiff.core.summary import empty
from traindiff.storage import StepObservations

_SUMMARY, _PARTS = NAMES.index("summary"), NAMES.index("parts")
_Place = tuple[int, int]
"""Which of the ranks, and which row of its step."""


@dataclass(slots=True, kw_only=True)
class _Alone:
    """A site with one observation: its entry, of which only the numbers change.

    Attributes:
        place: The observation.
        part: Its part, without the summary.
        values: Fields of the entry; None in place of the summary and the parts.
        unobserved: Whether it has no numbers.
    """

    place: _Place
    part: RankPart
    values: list[Any]
    unobserved: bool

    def entry(self, summary: Any) -> MergedSite:
        """The entry with the numbers of one step."""
        values = self.values
        values[_SUMMARY] = empty() if self.unobserved else summary
        micro_step, rank, shard, _, term = self.part
        values[_PARTS] = (RankPart(micro_step, rank, shard, summary, term),)
        entry = filled(values)
        values[_SUMMARY] = values[_PARTS] = None
        return entry


@dataclass(slots=True, kw_only=True)
class _Several:
    """A site with several observations, which is merged anew in each step."""

    key: SiteKey
    places: Sequence[_Place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A step by its plan: its table, and the observations that are no part of it."""

    table: dict[SiteKey, MergedSite]
    operators: list[Part]
    products: list[Part]


class TablePlan:
    """Makes the tables of steps in which each rank has the same observations.

    The table is that of `step_table`, site by site. What depends on the observations alone (which of them belong
    together, their order, shapes and gaps) is taken from the first such step.

    Args:
        of_ranks: A step, as each rank recorded it.
    """

    def __init__(self, of_ranks: Sequence[StepObservations]) -> None:
        self.layouts = tuple(one.layout for one in of_ranks)
        self._ranks = tuple(one.rank for one in of_ranks)
        self._operators: list[_Place] = []
        self._products: list[_Place] = []
        self._scaled: list[list[int]] = []
        self._factors: list[Any] = []
        by_site: dict[SiteKey, list[_Place]] = {}
        for number, step in enumerate(of_ranks):
            scaled = []
            for row, seen in enumerate(step.observations):
                if seen.stage in OPERATOR_STAGES or seen.stage in PRODUCT_STAGES:
                    (self._operators if seen.stage in OPERATOR_STAGES else self._products).append((number, row))
                    continue
                by_site.setdefault(site_key(seen), []).append((number, row))
                if seen.factor != 1.0 and not seen.unobserved:
                    scaled.append(row)
            self._scaled.append(scaled)
            self._factors.append(1.0 / np.array([step.observations[row].factor for row in scaled]))
        parts = [list(zip(one.observations, repeat(one.rank), one.summaries, strict=False)) for one in of_ranks]
        self._gaps = Gaps()
        self._sites: list[_Alone | _Several] = []
        for key, places in by_site.items():
            first = parts[places[0][0]][places[0][1]]
            alone = len(places) == 1 and first[0].merge != "mean"
            one = _alone(key, first, places[0], self._gaps) if alone else _Several(key=key, places=places)
            self._sites.append(one)

    def fits(self, of_ranks: Sequence[StepObservations]) -> bool:
        """True if each rank has the same observations in this step."""
        return (
            len(of_ranks) == len(self.layouts)
            and all(one.layout is layout for one, layout in zip(of_ranks, self.layouts, strict=True))
            and tuple(one.rank for one in of_ranks) == self._ranks
        )

    def planned(self, of_ranks: Sequence[StepObservations]) -> Planned:
        """The table of a step that fits."""
        original = [list(step.summaries) for step in of_ranks]
        relative = [own.copy() for own in original]
        count = sum(map(len, original))
        for step, own, rows, factors in zip(of_ranks, relative, self._scaled, self._factors, strict=True):
            for row, summary in zip(rows, scaled_rows(step.summaries[rows], factors, of=count), strict=True):
                own[row] = summary
        entries: list[MergedSite] = []
        for site in self._sites:
            if isinstance(site, _Alone):
                number, row = site.place
                entries.append(site.entry(relative[number][row]))
            else:
                parts = [self._part(of_ranks, relative, place) for place in site.places]
                entries += merged_site(site.key, parts, self._gaps)
        entries.sort(key=attrgetter("order"))
        return Planned(
            table={entry.key: entry for entry in entries},
            operators=[self._part(of_ranks, original, place) for place in self._operators],
            products=[self._part(of_ranks, original, place) for place in self._products],
        )

    def _part(self, of_ranks: Sequence[StepObservations], summaries: Sequence[list[Any]], place: _Place) -> Part:
        number, row = place
        return of_ranks[number].observations[row], self._ranks[number], summaries[number][row]


def _alone(key: SiteKey, first: Part, place: _Place, gaps: Gaps) -> _Alone:
    (entry,) = merged_site(key, [first], gaps)
    values = [getattr(entry, name) for name in NAMES]
    values[_SUMMARY] = values[_PARTS] = None
    (part,) = entry.parts
    own = entry.summary is part.summary  # a site without numbers has those of no elements
    return _Alone(place=place, part=part._replace(summary=None), values=values, unobserved=not own)


def plan_of(of_ranks: Sequence[StepObservations], sites: Sequence[Part]) -> TablePlan | None:
    """A plan for steps like this one; None if numbers decide which observations belong together.

    Args:
        of_ranks: The step, as each rank recorded it.
        sites: Its observations, without those of operators and products.
    """
    if any(one.layout is None for one in of_ranks) or any(_decides(seen) for seen, _, _ in sites):
        return None
    if any(seen.evaluation for seen, _, _ in sites if is_of_evaluation(seen.phase, seen.stage)):
        return None
    return None if without_idle(sites).parts else TablePlan(of_ranks)


def _decides(seen: Observation) -> bool:
    """True if the number at a site decides about others: a loss scale, or that gradients were cleared."""
    return seen.scaled or seen.path == LOSS_SCALE or (seen.phase == "grad" and seen.stage == CLEARED)
