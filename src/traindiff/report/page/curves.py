"""The curves at the head of a page: losses and norms of gradients, number by number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.observation import ALL_GRADIENTS
from traindiff.report.page.site_rows import SiteRow
from traindiff.site import ROOT

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
