"""Observations and summaries as Arrow record batches. A column that is that of the step before is not built again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from traindiff.core.observation import Observation
from traindiff.core.summary import SUMMARY, Summaries
from traindiff.storage.schema import ABOUT, NOTHING_STORED, SCHEMA, SHARD, Stored

_NAMES = Observation._fields


class Columns:
    """Makes the record batches of one recording, step after step."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[Any, Any]] = {}  # by name: values, and the arrays that were made of them

    def batch(
        self, observations: Sequence[Observation], summaries: Summaries, stored: Stored = NOTHING_STORED
    ) -> pa.RecordBatch:
        """One record batch of a step's observations; row i of it is observation i with summary i."""
        rows_of = zip(*observations, strict=True) if observations else ((),) * len(_NAMES)
        about = dict(zip(_NAMES, rows_of, strict=True))
        columns: list[Any] = []
        for one in ABOUT:
            columns += self._same(one.name, about[one.name], partial(_of_values, one.type))
        columns += self._same("shard", about["shard"], _of_shards)
        for name in SUMMARY.names or ():
            values = np.ascontiguousarray(summaries[name])
            flat = pa.array(values.reshape(-1))
            width = SUMMARY[name].shape
            columns.append(pa.FixedSizeListArray.from_arrays(flat, width[0]) if width else flat)
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


def _of_values(kind: pa.DataType, values: Sequence[Any]) -> list[pa.Array]:
    return [pa.array(values, kind)]


def _of_shards(shards: Sequence[Any]) -> list[pa.Array]:
    return [pa.array([getattr(shard, one.name) or () for shard in shards], one.type) for one in SHARD]
