"""The sites of a page: its rows, in the order of execution, and what the script of the page reads of them."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.history import History
from traindiff.core.observation import ALL_GRADIENTS, Observation
from traindiff.core.site import PHASES, ROOT
from traindiff.errors import RecordingError
from traindiff.present.page.terms import explanations
from traindiff.storage import Recording, open_recording

Place = tuple[str, str, str, str, int]
"""Phase, stage, path, slot and call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRow:
    """One site of a page.

    Attributes:
        place: Identifies it, except for the micro-step.
        micro_step: Its micro-step, if it has one for each micro-step.
        order: Its place in execution order.
        step: The step in which its difference, or its size, is largest.
        dtypes: Dtype on each side.
        shapes: Shape on each side.
        summaries: Summary on each side, in that step.
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
        order: By row, the number of the site in the history.
        places: The row of each place; of several micro-steps, the first.
    """

    rows: Sequence[SiteRow]
    order: Sequence[int]
    places: Mapping[Place, int]


def in_execution_order(noted: Iterable[SiteRow]) -> ShownSites:
    """The sites of a history as a page shows them, from a row for each, in the order of the history."""
    unsorted = list(noted)
    order = sorted(range(len(unsorted)), key=lambda at: (PHASES.index(unsorted[at].place[0]), unsorted[at].order))
    rows = [unsorted[at] for at in order]
    return ShownSites(rows=rows, order=order, places={row.place: at for at, row in reversed(list(enumerate(rows)))})


def place_of(finding: Finding) -> Place:
    """Where a finding is."""
    return finding.phase, finding.stage, finding.path, finding.slot, finding.call


MOST = 6
"""Most curves at the top of a page."""


def curve_rows(rows: Sequence[SiteRow]) -> list[int]:
    """Rows of the curves at the top: losses, numbers that the training logged, and the norm of all gradients."""
    scalars = [at for at, row in enumerate(rows) if row.place[0] == "loss" and _is_scalar(row)]
    losses = sorted(scalars, key=lambda at: rank_of_loss(*rows[at].place[2:4]))
    norms = [at for at, row in enumerate(rows) if row.place[:1] == ("grad",) and row.place[2:4] == _ALL]
    return [*losses[: MOST - len(norms[:1])], *norms[:1]]


def rank_of_loss(path: str, slot: str) -> int:
    """The order of numbers of the phase `loss`: losses, what was logged as a loss, other numbers, and scales last."""
    if slot != "logged":
        return 0
    return 3 if "scale" in path.lower() else 1 if "loss" in path.lower() else 2


_ALL = (ALL_GRADIENTS, "norm")


def title_of(row: SiteRow) -> str:
    """The title of a row's curve."""
    return "gradient norm, recomputed" if row.place[2:4] == _ALL else f"{row.place[2] or ROOT} ({row.place[3]})"


def numbers(values: NDArray[Any]) -> list[float | None]:
    """Numbers for JSON, with the 7 digits of float32; None in place of NaN and infinities."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in np.asarray(values, np.float64)]


def _is_scalar(row: SiteRow) -> bool:
    return all(shape == () for shape in row.shapes)


NUMBERS = (
    "count", "nan", "positive_infinity", "negative_infinity", "zero", "negative", "subnormal", "minimum", "maximum",
    "smallest", "sum", "sum_of_squares",
)  # fmt: skip
"""Fields of a summary that a page shows as numbers."""

PROFILES = ("row_squares", "row_largest", "column_squares", "column_largest")
"""Fields of a summary that a page draws."""


def data_of(
    sites: ShownSites,
    whole: History[Any],
    *,
    drawn: Sequence[str],
    recordings: Sequence[str],
    findings: Sequence[Finding],
) -> dict[str, Any]:
    """The data of the sites of a page, for its script.

    Args:
        sites: The rows.
        whole: The history that the rows are from.
        drawn: Numbers of the history that the heat map shows.
        recordings: Path of one recording, or paths of two.
        findings: All findings that the page names.
    """
    rows = sites.rows
    numbers, profiles = _numbers([row.summaries for row in rows])
    single = [at for at, row in enumerate(rows) if _is_scalar(row)]
    values = np.stack([whole.of(name)[[sites.order[at] for at in single]] for name in drawn]) if single else None
    return {
        "columns": whole.columns,
        "rows": _as_columns(rows),
        "cells": {name: packed(log_codes(whole.of(name)[list(sites.order)])) for name in drawn} if rows else {},
        "single": {"rows": single, "names": drawn, "values": packed(values)} if values is not None else None,
        "numbers": {"names": NUMBERS, "values": packed(numbers)} if rows else None,
        "profiles": {"names": PROFILES, "values": packed(profiles)} if rows else None,
        "histograms": histograms(recordings, rows),
        "terms": explanations(one.kind for one in findings),
        "findings": [
            {**one.to_json(), "message": one.said, "row": sites.places.get(place_of(one))} for one in findings
        ],
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
    """Numbers, `(rows, sides, NUMBERS)`, and profiles, `(rows, sides, PROFILES, buckets)`, of the rows' summaries."""
    numbers = np.array([[[float(one[name]) for name in NUMBERS] for one in sides] for sides in summaries])
    with np.errstate(over="ignore"):
        profiles = np.array([[[one[name] for name in PROFILES] for one in sides] for sides in summaries], np.float32)
    return numbers, profiles


MISSING, ZERO, INFINITE = 0, 1, 65535
"""Codes of values without a logarithm."""

LOWEST, HIGHEST = -64.0, 128.0
"""Binary logarithms of the smallest and the largest size with a code of its own: 5e-20, and the end of float32."""

STEPS = INFINITE - 2 - 2
"""Codes from the lowest to the highest; one is a factor of 1.002."""


def log_codes(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Sizes as 16-bit codes that are linear in their logarithm.

    Args:
        values: Any shape; signs are lost, and NaN stands for a missing value.

    Returns:
        Codes of the same shape, within 0.1 % of the sizes.
    """
    sizes = np.abs(np.asarray(values, dtype=np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        place = (np.log2(sizes) - LOWEST) * (STEPS / (HIGHEST - LOWEST))
    codes = 2 + np.clip(np.nan_to_num(np.rint(place), nan=0.0, posinf=STEPS, neginf=0.0), 0, STEPS)
    codes = np.where(np.isnan(sizes), MISSING, np.where(sizes == 0, ZERO, np.where(np.isinf(sizes), INFINITE, codes)))
    return np.asarray(codes, dtype=np.uint16)


def packed(values: NDArray[Any]) -> dict[str, Any]:
    """An array for the page: name of its typed array, its shape, and its little-endian bytes, deflated, in base 64.

    Bytes of the same significance are stored together, which deflates better.
    """
    little = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    size = little.dtype.itemsize
    planes = np.frombuffer(little.tobytes(), dtype=np.uint8).reshape(-1, size).T
    deflated = zlib.compress(np.ascontiguousarray(planes).tobytes(), 6)
    return {
        "type": _TYPES[values.dtype.name],
        "shape": list(values.shape),
        "data": base64.b64encode(deflated).decode("ascii"),
    }


_TYPES = {"uint16": "Uint16Array", "float32": "Float32Array", "float64": "Float64Array"}


FIRST = -160
"""Binary exponent of the first count of a histogram (FORMAT.md)."""

Counts = NDArray[np.int64]


def histograms(paths: Sequence[str], rows: Sequence[SiteRow]) -> dict[int, dict[str, Any]]:
    """Histograms of the sites of a page. Each belongs to the step whose numbers the page shows.

    Args:
        paths: Paths of one recording, or of two.
        rows: The sites.

    Returns:
        For each row: `first`, the exponent of the first count, and the `counts` of each recording. The counts cover all
        exponents that occur in any recording. Empty if no recording has histograms.
    """
    wanted = {(row.place, row.step): at for at, row in enumerate(rows) if not row.micro_step}
    try:
        held = [_of_recording(open_recording(path), wanted) for path in paths]
    except (RecordingError, OSError):
        return {}
    found = {}
    for at in sorted(set.intersection(*(set(one) for one in held))):
        counts = np.array([one[at] for one in held])
        some = np.flatnonzero(counts.any(axis=0))
        if some.size:
            first, last = int(some[0]), int(some[-1])
            found[at] = {"first": first + FIRST, "counts": counts[:, first : last + 1].tolist()}
    return found


def _of_recording(recording: Recording, wanted: Mapping[tuple[Place, int], int]) -> dict[int, Counts]:
    """The sums of the histograms of the disjoint parts of each site."""
    found: dict[int, Counts] = {}
    if "exponents" not in recording.run["settings"].get("detail", ()):
        return found
    steps = {step for _, step in wanted}
    seen: set[tuple[Any, ...]] = set()
    for rank in recording.ranks:
        for step in recording.steps(rank):
            if step.step not in steps:
                continue
            for number, counts in step.stored.exponents.items():
                one = step.observations[number]
                at = wanted.get((_place(one), one.step))
                part = (at, one.micro_step, one.shard)  # copies on several ranks count once
                # A sum of tensors has another histogram than its terms, and a scaled one lies elsewhere.
                if at is None or part in seen or one.merge != "shard" or one.scaled or one.factor != 1.0:
                    continue
                seen.add(part)
                found[at] = found[at] + counts if at in found else np.array(counts)
    return found


def _place(one: Observation) -> Place:
    return one.phase, one.stage, one.path, one.slot, one.call
