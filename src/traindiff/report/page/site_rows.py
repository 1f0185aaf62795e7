"""The sites of a page: its rows, in the order of execution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traindiff.findings import Finding
from traindiff.site import PHASES

Place = tuple[str, str, str, str, int]
"""Phase, stage, path, slot and call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRow:
    """One site of a page.

    Attributes:
        place: What identifies it, but for the micro-step.
        micro_step: Of what is told apart by micro-steps.
        order: Where it comes in execution order.
        step: In which it is farthest, or largest.
        dtypes: Of each side.
        shapes: Of each side.
        summaries: Of each side, in that step.
    """

    place: Place
    micro_step: int
    order: int
    step: int
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    summaries: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSites:
    """All sites of a page.

    Attributes:
        rows: In execution order, phase by phase.
        order: By row, which site of the history it is.
        places: The row of each place; of one with several micro-steps the first.
    """

    rows: Sequence[SiteRow]
    order: Sequence[int]
    places: Mapping[Place, int]


def in_execution_order(noted: Iterable[SiteRow]) -> ShownSites:
    """The sites of a history as a page shows them.

    Args:
        noted: A row for each site, in the order of the history.
    """
    unsorted = list(noted)
    order = sorted(range(len(unsorted)), key=lambda at: (PHASES.index(unsorted[at].place[0]), unsorted[at].order))
    rows = [unsorted[at] for at in order]
    return ShownSites(rows=rows, order=order, places={row.place: at for at, row in reversed(list(enumerate(rows)))})


def place_of(finding: Finding) -> Place:
    """Where a finding is."""
    return finding.phase, finding.stage, finding.path, finding.slot, finding.call
