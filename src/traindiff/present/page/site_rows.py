"""The sites of a page: its rows, in the order of execution."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.findings import Finding
from traindiff.core.observation import ALL_GRADIENTS
from traindiff.core.site import PHASES, ROOT

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


MOST = 6
"""Curves that a page begins with."""


def curve_rows(rows: Sequence[SiteRow]) -> list[int]:
    """Rows that are drawn first: the losses, numbers that the training logged, and the norm of all gradients."""
    scalars = [at for at, row in enumerate(rows) if row.place[0] == "loss" and _is_scalar(row)]
    losses = [at for at in scalars if rows[at].place[3] != "logged"] + [
        at for at in scalars if rows[at].place[3] == "logged"
    ]
    norms = [at for at, row in enumerate(rows) if row.place[:1] == ("grad",) and row.place[2:4] == _ALL]
    return [*losses[: MOST - len(norms[:1])], *norms[:1]]


_ALL = (ALL_GRADIENTS, "norm")


def title_of(row: SiteRow) -> str:
    """What a curve shows."""
    return "gradient norm, recomputed" if row.place[2:4] == _ALL else f"{row.place[2] or ROOT} ({row.place[3]})"


def numbers(values: NDArray[Any]) -> list[float | None]:
    """Numbers for JSON, to the 7 digits of float32; None for what is not finite."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in np.asarray(values, np.float64)]


def _is_scalar(row: SiteRow) -> bool:
    return all(shape == () for shape in row.shapes)
