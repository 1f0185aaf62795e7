"""Whole gradients from the observations of one rank, or of several that hold shards of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.merge.site import MergedSite
from traindiff.analyse.merge.step_table import step_table
from traindiff.analyse.signs import Signs, Stored, merged, part_signs
from traindiff.compat.msprobe.tables import Columns, Row
from traindiff.core.observation import LOSS_SCALE, Observation
from traindiff.core.summary import extremes


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An observation on one rank, with its summary and what else was kept of it, which `read` gives."""

    seen: Observation
    rank: int
    summary: Any
    read: Callable[[], Stored]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGradient:
    """A gradient that an optimizer was given.

    Attributes:
        path: Canonical path of the parameter.
        shape: Its shape; of complex numbers with a last axis of length 2.
        summary: Relative to the gradient of the global loss; extremes and squares are those of all elements.
        counts: By interval; None where they were not counted.
        md5: Of its bytes, hexadecimal; empty where it was not recorded.
        signs: None where they were not recorded.
    """

    path: str
    shape: tuple[int, ...]
    summary: Any
    counts: NDArray[np.int64] | None
    md5: str
    signs: Signs | None

    def row(self, columns: Columns, name: str) -> Row:
        """Its row in a table, where the parameter is called `name`; numbers are rounded to float32, as by msprobe."""
        minimum, maximum = extremes(self.summary)
        digest = self.md5 if columns.digest == "MD5" else f"{int(self.summary['fingerprint']):016x}"
        return Row(
            name=name, shape=self.shape, maximum=_float32(maximum), minimum=_float32(minimum),
            norm=_float32(_norm(self.summary)), digest=digest, shares=self._shares(columns),
        )  # fmt: skip

    def _shares(self, columns: Columns) -> tuple[float, ...]:
        if columns.bounds is None:
            return ()
        size = int(self.summary["count"])
        counts = [] if self.counts is None or not columns.bounds else self.counts.tolist()
        return tuple(count / size if size else 0.0 for count in [*counts, int(self.summary["zero"])])


def is_gradient(seen: Observation) -> bool:
    """True if this is a gradient as an optimizer was given it."""
    return (seen.phase, seen.stage, seen.slot) == ("grad", "", "grad")


def is_whole(seen: Observation) -> bool:
    """True if this is a gradient of which the rank holds all elements."""
    return is_gradient(seen) and seen.shard.shape == seen.shard.global_shape


def concerns_gradients(seen: Observation) -> bool:
    """True if `whole_gradients` wants to know of this observation."""
    return is_gradient(seen) or (seen.phase, seen.path) == ("loss", LOSS_SCALE)


def whole_gradients(parts: Iterable[Kept], bounds: tuple[float, ...]) -> Iterator[WholeGradient]:
    """The gradients of one step of which all elements are there, in execution order; one at a time is read.

    The parts are those of one rank, or of all ranks: what `concerns_gradients`.
    """
    held = list(parts)
    by_path: dict[str, list[Kept]] = {}
    for part in held:
        if is_gradient(part.seen):
            by_path.setdefault(part.seen.path, []).append(part)
    table = step_table((part.seen, part.rank, part.summary) for part in held)
    entries = {
        key.path: entry for key, entry in table.items() if (key.phase, key.stage, key.slot) == ("grad", "", "grad")
    }
    for path, entry in entries.items():
        own = by_path[path]
        if not entry.unobserved:
            yield _of_entry(entry, own, bounds)
        elif int(own[0].summary["count"]):  # another tool kept some of its numbers
            yield _of_import(own[0], bounds)


def _of_entry(entry: MergedSite, parts: list[Kept], bounds: tuple[float, ...]) -> WholeGradient:
    shards = {part.seen.shard: part for part in reversed(parts)}
    stored = {shard: part.read() for shard, part in shards.items()}
    known = [
        (shard, signs)
        for shard, part in shards.items()
        if (signs := part_signs(stored[shard], part.summary, shard.size)) is not None
    ]
    counts = [_counts(stored[shard], part.summary, bounds) for shard, part in shards.items()]
    counted = [one for one in counts if one is not None]
    digests = [one["md5"].tobytes().hex() for one in stored.values() if "md5" in one]
    return WholeGradient(
        path=entry.key.path,
        shape=entry.shape,
        summary=entry.summary,
        counts=np.sum(counted, axis=0) if bounds and len(counted) == len(shards) else None,
        md5=digests[0] if len(shards) == len(digests) == 1 else "",
        signs=merged(known, entry.shape) if len(known) == len(shards) else None,
    )


def _of_import(part: Kept, bounds: tuple[float, ...]) -> WholeGradient:
    stored = part.read()
    shard = part.seen.shard
    return WholeGradient(
        path=part.seen.path, shape=shard.shape, summary=part.summary, counts=_counts(stored, part.summary, bounds),
        md5="", signs=part_signs(stored, part.summary, shard.size) if "positive" in stored else None,
    )  # fmt: skip


def _counts(stored: Stored, summary: Any, bounds: tuple[float, ...]) -> NDArray[np.int64] | None:
    """Elements by interval; of a scalar, the summary tells."""
    if "intervals" in stored:
        return stored["intervals"].astype(np.int64)
    if not bounds or int(summary["count"]) != 1:
        return None
    counts = np.zeros(len(bounds) + 1, dtype=np.int64)
    _, maximum = extremes(summary)
    if not math.isnan(maximum):
        counts[np.searchsorted(np.array(bounds, dtype=np.float64), maximum)] = 1
    return counts


def _norm(summary: Any) -> float:
    """Norm of all elements; a summary has that of the finite ones."""
    if int(summary["nan"]):
        return math.nan
    if int(summary["positive_infinity"]) or int(summary["negative_infinity"]):
        return math.inf
    return math.sqrt(max(0.0, float(summary["sum_of_squares"])))


def _float32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))
