"""Observations and summaries as an Arrow record batch, and back."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.core.site import printable
from traindiff.core.summary import SUMMARY, Summaries
from traindiff.storage.checked_rows import NUM_EXPONENTS, Malformed, check_tensor_file, check_texts, checked_shard

_ABOUT: tuple[pa.Field, ...] = (
    pa.field("step", pa.int64(), nullable=False),
    pa.field("micro_step", pa.int32(), nullable=False),
    pa.field("optimizer", pa.utf8(), nullable=False),
    pa.field("phase", pa.utf8(), nullable=False),
    pa.field("stage", pa.utf8(), nullable=False),
    pa.field("path", pa.utf8(), nullable=False),
    pa.field("slot", pa.utf8(), nullable=False),
    pa.field("call", pa.int32(), nullable=False),
    pa.field("order", pa.int64(), nullable=False),
    pa.field("dtype", pa.utf8(), nullable=False),
    pa.field("merge", pa.utf8(), nullable=False),
    pa.field("weight", pa.float64(), nullable=False),
    pa.field("factor", pa.float64(), nullable=False),
    pa.field("term", pa.int32(), nullable=False),
    pa.field("scaled", pa.bool_(), nullable=False),
    pa.field("unobserved", pa.utf8(), nullable=False),
)
_SHARD: tuple[pa.Field, ...] = tuple(
    pa.field(name, pa.list_(pa.int64()), nullable=False) for name in ("shape", "global_shape", "offset", "spacing")
)
_ARROW_TYPES = {"i": pa.int64(), "u": pa.uint64(), "f": pa.float64()}


def _summary_field(name: str) -> pa.Field:
    dtype = SUMMARY[name]
    arrow = _ARROW_TYPES[dtype.base.kind]
    return pa.field(name, pa.list_(arrow, dtype.shape[0]) if dtype.shape else arrow, nullable=False)


_DETAIL: tuple[pa.Field, ...] = (
    pa.field("exponents", pa.list_(pa.int64()), nullable=False),
    pa.field("tensors", pa.utf8(), nullable=False),
)
SCHEMA = pa.schema([*_ABOUT, *_SHARD, *(_summary_field(name) for name in SUMMARY.names or ()), *_DETAIL])
"""Columns of `observations.arrows`, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The optional parts of a step's observations, by row: exponents, and names of files with tensors."""

    exponents: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    files: Mapping[int, str] = field(default_factory=dict)

    def joined(self, more: Stored, *, after: int) -> Stored:
        """With those of further observations, which begin at row `after`."""
        return Stored(
            exponents={**self.exponents, **{after + row: counts for row, counts in more.exponents.items()}},
            files={**self.files, **{after + row: name for row, name in more.files.items()}},
        )


NOTHING_STORED = Stored()


def to_batch(
    observations: Sequence[Observation], summaries: Summaries, stored: Stored = NOTHING_STORED
) -> pa.RecordBatch:
    """One record batch of a step's observations; row i of it is observation i with summary i."""
    columns = [pa.array([getattr(seen, field.name) for seen in observations], field.type) for field in _ABOUT]
    columns += [
        pa.array([getattr(seen.shard, field.name) or () for seen in observations], field.type) for field in _SHARD
    ]
    for name in SUMMARY.names or ():
        values = np.ascontiguousarray(summaries[name])
        flat = pa.array(values.reshape(-1))
        width = SUMMARY[name].shape
        columns.append(pa.FixedSizeListArray.from_arrays(flat, width[0]) if width else flat)
    rows = range(len(observations))
    columns.append(pa.array([stored.exponents.get(row, ()) for row in rows], pa.list_(pa.int64())))
    columns.append(pa.array([stored.files.get(row, "") for row in rows], pa.utf8()))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def from_batch(batch: pa.RecordBatch) -> tuple[list[Observation], Summaries, Stored]:
    """The inverse of `to_batch`, but that texts are `printable`.

    Equal texts and shards of a batch are one object each.

    Args:
        batch: Its columns are known to be well-formed: of a stranger's, `check_columns` says so.

    Raises:
        Malformed: No observations are like that.
    """
    about = [_values(batch.column(field.name)) for field in _ABOUT]
    names = (*(field.name for field in _ABOUT), "shard")
    rows = zip(*about, _shards(batch), strict=True)
    observations = [Observation(**dict(zip(names, row, strict=True))) for row in rows]

    summaries = np.empty(batch.num_rows, dtype=SUMMARY)
    for name in SUMMARY.names or ():
        column = batch.column(name)
        flat = column.flatten() if SUMMARY[name].shape else column
        summaries[name] = flat.to_numpy().reshape(batch.num_rows, *SUMMARY[name].shape)
    sizes = np.array([seen.shard.size for seen in observations], dtype=np.uint64)
    if (summaries["count"].astype(np.uint64) > sizes).any():
        raise Malformed("a summary counts more elements than its tensor has")
    files = enumerate(batch.column("tensors").to_pylist())
    stored = Stored(
        exponents=_exponents(batch.column("exponents")),
        files={row: check_tensor_file(name) for row, name in files if name},
    )
    return observations, summaries, stored


def _exponents(column: pa.ListArray) -> dict[int, NDArray[np.int64]]:
    there = np.flatnonzero(np.diff(column.offsets.to_numpy()))
    return dict(zip(there.tolist(), column.flatten().to_numpy().reshape(-1, NUM_EXPONENTS), strict=True))


def _values(column: pa.Array) -> list[Any]:
    """The values of a column. Texts repeat from row to row, step to step and rank to rank; each is kept once.

    They come from whoever wrote the recording, and are read by people: see `printable`.
    """
    if not pa.types.is_string(column.type):
        values: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return values
    encoded = column.dictionary_encode()
    texts = [sys.intern(printable(text)) for text in check_texts(encoded.dictionary.to_pylist())]
    return [texts[number] for number in encoded.indices.to_numpy().tolist()]


def _shards(batch: pa.RecordBatch) -> list[Shard]:
    """The shard of each row."""
    known: dict[tuple[bytes, ...], Shard] = {}
    found = []
    for key in zip(*(_slices(batch.column(one.name)) for one in _SHARD), strict=True):
        shard = known.get(key)
        if shard is None:
            shape, whole, offset, spacing = (tuple(np.frombuffer(part, dtype=np.int64).tolist()) for part in key)
            shard = known[key] = checked_shard(shape, whole, offset, spacing)
        found.append(shard)
    return found


def _slices(column: pa.ListArray) -> list[bytes]:
    """The bytes of each row's list of numbers."""
    ends = (column.offsets.to_numpy() * 8).tolist()
    content = column.values.to_numpy().tobytes()
    return [content[first:end] for first, end in pairwise(ends)]
