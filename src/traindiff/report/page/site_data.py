"""What the script of a page reads of its sites."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.findings import Finding
from traindiff.merging.history import History
from traindiff.report.page.encoding import log_codes, packed
from traindiff.report.page.histograms import histograms
from traindiff.report.page.site_rows import ShownSites, SiteRow, place_of
from traindiff.site import ROOT

NUMBERS = (
    "count", "nan", "positive_infinity", "negative_infinity", "zero", "negative", "subnormal", "minimum", "maximum",
    "smallest", "sum", "sum_of_squares",
)  # fmt: skip
"""Fields of a summary that a page shows as numbers."""

PROFILES = ("row_squares", "row_largest", "column_squares", "column_largest")
"""Fields that it draws."""


def data_of(
    sites: ShownSites,
    whole: History[Any],
    *,
    drawn: Sequence[str],
    recordings: Sequence[str],
    findings: Iterable[Finding],
) -> dict[str, Any]:
    """What every page has of its sites, whatever it is about.

    Args:
        sites: Its rows.
        whole: The history that they are from.
        drawn: Numbers of the history that the heat map shows.
        recordings: Of one run, or of two.
        findings: All that the page names.
    """
    rows = sites.rows
    numbers, profiles = _numbers([row.summaries for row in rows])
    return {
        "columns": whole.columns,
        "rows": _as_columns(rows),
        "cells": {name: packed(log_codes(whole.of(name)[list(sites.order)])) for name in drawn} if rows else {},
        "numbers": {"names": NUMBERS, "values": packed(numbers)} if rows else None,
        "profiles": {"names": PROFILES, "values": packed(profiles)} if rows else None,
        "histograms": histograms(recordings, rows),
        "findings": [{**one.to_json(), "row": sites.places.get(place_of(one))} for one in findings],
    }


def _as_columns(rows: Sequence[SiteRow]) -> dict[str, list[Any]]:
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


def _numbers(summaries: Sequence[Sequence[Any]]) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
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
