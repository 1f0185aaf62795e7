"""Observations and summaries as Arrow record batches. A column that is that of the step before is not built again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from traindiff.core.observation import Observation
from traindiff.core.observation_table import columns_of
from traindiff.core.summary import SUMMARY, Summaries
from traindiff.storage.schema import ABOUT, ARROW_TYPES, NOTHING_STORED, SCHEMA, SHARD, Stored


class Columns:
    """Makes the record batches of one recording, step after step."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[Any, Any]] = {}  # by name: values, and the arrays that were made of them

    def batch(
        self, observations: Sequence[Observation], summaries: Summaries, stored: Stored = NOTHING_STORED
    ) -> pa.RecordBatch:
        """One record batch of a step's observations; row i of it is observation i with summary i."""
        about = dict(zip(Observation._fields, columns_of(observations), strict=True))
        columns: list[Any] = []
        for one in ABOUT:
            columns += self._same(one.name, about[one.name], partial(_of_values, one.type))
        columns += self._same("shard", about["shard"], _of_shards)
        columns += _of_summaries(summaries)
        rows = range(len(observations))
        exponents = tuple((row, one.tobytes()) for row, one in stored.exponents.items())
        columns += self._same(
            "exponents",
            (rows, exponents),
            lambda _: [pa.array([stored.exponents.get(row, ()) for row in rows], pa.list_(pa.int64()))],
        )
        columns += self._same(
            "files",
            (rows, tuple(stored.files.items())),
            lambda _: [pa.array([stored.files.get(row, "") for row in rows], pa.utf8())],
        )
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def _same(self, name: str, values: Any, make: Callable[[Any], list[pa.Array]]) -> list[pa.Array]:
        """The arrays that `make` makes of values; those of the step before if the values are the same.

        Texts, numbers and shards that come again are as a rule the same objects, which is quick to see.
        """
        latest = self._latest.get(name)
        if latest is None or latest[0] != values:
            latest = self._latest[name] = values, make(values)
        return latest[1]


def to_batch(
    observations: Sequence[Observation], summaries: Summaries, stored: Stored = NOTHING_STORED
) -> pa.RecordBatch:
    """One record batch by itself; see `Columns.batch`."""
    return Columns().batch(observations, summaries, stored)


def _of_summaries(summaries: Summaries) -> Iterator[pa.Array]:
    """A column for each field: its numbers row by row, without a copy by Arrow."""
    count = len(summaries)
    words = np.ascontiguousarray(summaries).view(np.int64).reshape(count, -1)
    for first, end, kind, listed in _FIELDS:
        held = np.ascontiguousarray(words[:, first:end])
        flat = pa.Array.from_buffers(kind, held.size, [None, pa.py_buffer(held)])
        yield flat if listed is None else pa.Array.from_buffers(listed, count, [None], children=[flat])


def _fields() -> Iterator[tuple[int, int, pa.DataType, pa.DataType | None]]:
    """The words of a summary that each field takes, the type of its numbers, and that of a list of them."""
    for dtype, place, *_ in (SUMMARY.fields or {}).values():
        width = dtype.shape[0] if dtype.shape else 1
        kind = ARROW_TYPES[dtype.base.kind]
        yield place // 8, place // 8 + width, kind, pa.list_(kind, width) if dtype.shape else None


_FIELDS = tuple(_fields())


def _of_values(kind: pa.DataType, values: Sequence[Any]) -> list[pa.Array]:
    return [pa.array(values, kind)]


def _of_shards(shards: Sequence[Any]) -> list[pa.Array]:
    return [pa.array([getattr(shard, one.name) or () for shard in shards], one.type) for one in SHARD]
