"""The sites of a page: its rows, in the order of execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.findings import Finding
from traindiff.site import PHASES, ROOT

NUMBERS = (
    "count", "nan", "positive_infinity", "negative_infinity", "zero", "negative", "subnormal", "minimum", "maximum",
    "smallest", "sum", "sum_of_squares",
)  # fmt: skip
"""Fields of a summary that a page shows as numbers."""

PROFILES = ("row_squares", "row_largest", "column_squares", "column_largest")
"""Fields that it draws."""

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
    """

    place: Place
    micro_step: int
    order: int
    step: int
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def ascending(rows: Sequence[SiteRow]) -> list[int]:
    """Places of rows in execution order, phase by phase."""
    return sorted(range(len(rows)), key=lambda at: (PHASES.index(rows[at].place[0]), rows[at].order))


def as_columns(rows: Sequence[SiteRow]) -> dict[str, list[Any]]:
    """The rows for the page, attribute by attribute."""
    return {
        "phase": [row.place[0] for row in rows],
        "stage": [row.place[1] for row in rows],
        "path": [row.place[2] or ROOT for row in rows],
        "slot": [row.place[3] for row in rows],
        "call": [row.place[4] for row in rows],
        "micro": [row.micro_step for row in rows],
        "step": [row.step for row in rows],
        "dtype": [" / ".join(dict.fromkeys(row.dtypes)) for row in rows],
        "shape": [" / ".join(dict.fromkeys(map(_shape, row.shapes))) for row in rows],
    }


def _shape(lengths: tuple[int, ...]) -> str:
    return " x ".join(map(str, lengths)) or "scalar"


def rows_by_place(rows: Sequence[SiteRow]) -> dict[Place, int]:
    """The row of each place; of one with several micro-steps the first."""
    return {row.place: at for at, row in reversed(list(enumerate(rows)))}


def place_of(finding: Finding) -> Place:
    """Where a finding is."""
    return finding.phase, finding.stage, finding.path, finding.slot, finding.call


def numbers_of(summaries: Sequence[Sequence[Any]]) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Numbers and profiles of the summaries of each row.

    Args:
        summaries: By row, of one side or of both.

    Returns:
        `(rows, sides, NUMBERS)`, and `(rows, sides, PROFILES, buckets)`.
    """
    numbers = np.array([[[float(one[name]) for name in NUMBERS] for one in sides] for sides in summaries])
    with np.errstate(over="ignore"):
        profiles = np.array([[[one[name] for name in PROFILES] for one in sides] for sides in summaries], np.float32)
    return numbers, profiles


def finding_of(finding: Finding, *, rows: Mapping[Place, int]) -> dict[str, Any]:
    """A finding for the page: as in the JSON, with the row of its site."""
    return {**finding.to_json(), "row": rows.get(place_of(finding))}
