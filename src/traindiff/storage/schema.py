"""The columns of a record batch of observations and summaries, and its rows, which are checked before they are used."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traindiff.core.observation import Merge, Observation
from traindiff.core.shards import OPEN, Shard
from traindiff.core.site import PHASES, printable
from traindiff.core.summary import SUMMARY, Summaries

ABOUT: tuple[pa.Field, ...] = tuple(
    pa.field(name, kind, nullable=False)
    for name, kind in {
        "step": pa.int64(), "evaluation": pa.int32(), "micro_step": pa.int32(), "optimizer": pa.utf8(),
        "phase": pa.utf8(), "stage": pa.utf8(), "path": pa.utf8(), "slot": pa.utf8(), "call": pa.int32(),
        "order": pa.int64(), "dtype": pa.utf8(), "merge": pa.utf8(), "weight": pa.float64(), "factor": pa.float64(),
        "term": pa.int32(), "scaled": pa.bool_(), "unobserved": pa.utf8(),
    }.items()
)  # fmt: skip
SHARD: tuple[pa.Field, ...] = tuple(
    pa.field(name, pa.list_(pa.int64()), nullable=False) for name in ("shape", "global_shape", "offset", "spacing")
)
ARROW_TYPES = {"i": pa.int64(), "u": pa.uint64(), "f": pa.float64()}


def _summary_field(name: str) -> pa.Field:
    dtype = SUMMARY[name]
    arrow = ARROW_TYPES[dtype.base.kind]
    return pa.field(name, pa.list_(arrow, dtype.shape[0]) if dtype.shape else arrow, nullable=False)


_DETAIL: tuple[pa.Field, ...] = (
    pa.field("exponents", pa.list_(pa.int64()), nullable=False),
    pa.field("tensors", pa.utf8(), nullable=False),
)
SCHEMA = pa.schema([*ABOUT, *SHARD, *(_summary_field(name) for name in SUMMARY.names or ()), *_DETAIL])
"""Columns of `observations.arrows`, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The optional parts of a step's observations, by row: exponents, and names of files with tensors."""

    exponents: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    files: Mapping[int, str] = field(default_factory=dict)

    def joined(self, more: Stored, *, after: int) -> Stored:
        """These parts with those of further observations, whose rows begin at `after`."""
        return Stored(
            exponents={**self.exponents, **{after + row: counts for row, counts in more.exponents.items()}},
            files={**self.files, **{after + row: name for row, name in more.files.items()}},
        )


NOTHING_STORED = Stored()


About = Mapping[str, list[Any]]
"""Values of the fields of `Observation`, row by row, without `step`; and `size`, the elements of each shard."""


def from_batch(batch: pa.RecordBatch) -> tuple[list[Observation], Summaries, Stored]:
    """The inverse of `traindiff.storage.columns.to_batch`, except that texts become `printable`.

    Equal texts and equal shards of a batch share one object.

    Args:
        batch: Its columns are well-formed; `check_columns` makes sure of that for files of strangers.

    Raises:
        Malformed: Its rows cannot be observations.
    """
    about, summaries = about_of(batch), np.empty(batch.num_rows, dtype=SUMMARY)
    return observations_of(batch, about), summaries, numbers_of(batch, about, summaries)


def about_of(batch: pa.RecordBatch, held: About | None = None) -> About:
    """What the columns say about each observation, except its step.

    Args:
        batch: The columns; those that are known may be missing.
        held: What known columns say.

    Raises:
        Malformed: Its rows cannot be observations.
    """
    known = held or {}
    found = {name: known[name] if name in known else _values(batch.column(name)) for name in _ABOUT_NAMES}
    shards = known["shard"] if "shard" in known else _shards(batch)
    return {**found, "shard": shards, "size": [shard.size for shard in shards]}


def observations_of(batch: pa.RecordBatch, about: About) -> list[Observation]:
    """The observations of a batch, from its steps and what is said about each row."""
    steps = batch.column("step").to_numpy().tolist()
    rows = zip(steps, *(about[name] for name in Observation._fields[1:]), strict=True)
    return list(map(partial(tuple.__new__, Observation), rows))


def numbers_of(batch: pa.RecordBatch, about: About, summaries: Summaries) -> Stored:
    """The optional parts of a batch; its summaries are written to an array.

    Args:
        batch: The columns.
        about: What they say about each observation.
        summaries: The array, with a place for each row.

    Raises:
        Malformed: They cannot belong to these observations.
    """
    for name in SUMMARY.names or ():
        column = batch.column(name)
        flat = _listed(column) if SUMMARY[name].shape else column.to_numpy()
        summaries[name] = flat.reshape(batch.num_rows, *SUMMARY[name].shape)
    if (summaries["count"].astype(np.uint64) > np.array(about["size"], dtype=np.uint64)).any():
        raise Malformed("a summary counts more elements than its tensor has")
    files = enumerate(_texts(batch.column("tensors")))
    return Stored(
        exponents=_exponents(batch.column("exponents")),
        files={row: check_tensor_file(name) for row, name in files if name},
    )


_ABOUT_NAMES = tuple(field.name for field in ABOUT if field.name != "step")
ABOUT_COLUMNS = frozenset({*_ABOUT_NAMES, *(field.name for field in SHARD)})
"""The columns that `about_of` reads."""


def _exponents(column: pa.ListArray) -> dict[int, NDArray[np.int64]]:
    there = np.flatnonzero(np.diff(column.offsets.to_numpy()))
    return dict(zip(there.tolist(), _listed(column).reshape(-1, NUM_EXPONENTS), strict=True))


def _listed(column: pa.ListArray | pa.FixedSizeListArray) -> NDArray[Any]:
    """The numbers of all lists of a column. Not by `flatten`, which loads Arrow's functions: a tenth of a second."""
    values: NDArray[Any] = column.values.to_numpy()
    if isinstance(column, pa.FixedSizeListArray):
        width = column.type.list_size
        return values[width * column.offset : width * (column.offset + len(column))]
    ends = column.offsets.to_numpy()
    return values[ends[0] : ends[-1]]


def _values(column: pa.Array) -> list[Any]:
    """The values of a column; texts are made `printable`, and equal texts share one object."""
    if not pa.types.is_string(column.type):
        values: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return values
    return _texts(column)


def _texts(column: pa.StringArray) -> list[str]:
    """The texts of a column, made `printable`; equal ones share one object. Not by Arrow, whose functions load late."""
    _, ends, content = column.buffers()
    if not content:
        return [""] * len(column)
    data = content.to_pybytes()
    found = np.frombuffer(ends, dtype=np.int32, count=len(column) + 1, offset=4 * column.offset).tolist()
    parts = [data[first:end] for first, end in pairwise(found)]
    distinct = dict.fromkeys(parts)
    texts = [part.decode() for part in distinct]
    known = dict(zip(distinct, map(sys.intern, map(printable, check_texts(texts))), strict=True))
    return [known[part] for part in parts]


def _shards(batch: pa.RecordBatch) -> list[Shard]:
    """The shard of each row."""
    known: dict[tuple[bytes, ...], Shard] = {}
    found = []
    for key in zip(*(_slices(batch.column(one.name)) for one in SHARD), strict=True):
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


MOST_AXES = 64
"""Limit for the axes of a tensor; torch has the same."""

MOST_ELEMENTS = 1 << 62
"""Limit for the elements of a tensor; axes of length 0 are left out of the product."""

MOST_CHARACTERS = 1 << 20
"""Limit for the characters of a text."""

NUM_EXPONENTS = 320

_TENSOR_FILE = re.compile(r"tensors/step-\d{6,19}/\d{8,19}-[A-Za-z0-9._%~-]{1,200}\.[0-9a-f]{8}\.safetensors", re.ASCII)
_MERGES = frozenset(get_args(Merge))
_NOT_NEGATIVE = ("step", "evaluation", "micro_step", "call", "term", "count", "nan", "positive_infinity",
                 "negative_infinity", "zero", "negative", "subnormal", "sum_of_squares")  # fmt: skip
_APART = ("nan", "positive_infinity", "negative_infinity", "zero")
"""Counts of disjoint sets of elements."""


class Malformed(Exception):  # noqa: N818
    """A message cannot belong to a step; the text is a clause that says why."""


@contextmanager
def decoding() -> Iterator[None]:
    """Inside this context, an error of Arrow becomes `Malformed`."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, StopIteration) as error:
        raise Malformed(" ".join(str(error).split())[:300]) from None


def check_columns(batch: pa.RecordBatch) -> None:
    """Refuse a batch that Arrow finds malformed, or whose values no observation can have.

    Args:
        batch: The columns of a step. Those of `ABOUT_COLUMNS` may be missing if they have been checked before.

    Raises:
        Malformed: The batch is refused.
    """
    with decoding():
        batch.validate(full=True)
    there = frozenset(batch.schema.names)
    numbers = {name: _numbers(batch, name) for name in _NOT_NEGATIVE if name in there}
    if (np.concatenate([*numbers.values()], dtype=np.float64) < 0).any():
        name = next(name for name, column in numbers.items() if (column < 0).any())
        raise Malformed(f'column "{name}" has a negative number')
    if "factor" in there:
        factors = _numbers(batch, "factor")
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise Malformed('column "factor" has a number that is no factor')
    counts = _numbers(batch, "count")
    apart = sum((_numbers(batch, name).astype(np.float64) for name in _APART), np.zeros(len(counts)))
    if (apart > counts).any() or any((_numbers(batch, name) > counts).any() for name in ("negative", "subnormal")):
        raise Malformed("a tensor has more elements of one kind than elements")
    steps = _numbers(batch, "step")
    if (steps != steps[0]).any() or ("optimizer" in there and len(set(_texts(batch.column("optimizer")))) != 1):
        name = "step" if (steps != steps[0]).any() else "optimizer"
        raise Malformed(f'column "{name}" differs between the rows of a step')
    for name, known in (("merge", _MERGES), ("phase", frozenset(PHASES))):
        if name in there and (unknown := [one for one in _texts(batch.column(name)) if one not in known]):
            raise Malformed(f'column "{name}" holds {unknown[0][:80]!r}')
    _check_exponents(batch.column("exponents"), counts)


def check_texts(texts: list[str]) -> list[str]:
    """The texts, if none is too long."""
    if (longest := max(map(len, texts), default=0)) > MOST_CHARACTERS:
        raise Malformed(f"a text has {longest} characters, and may have {MOST_CHARACTERS}")
    return texts


def check_tensor_file(name: str) -> str:
    """The name of a file with tensors, if the format allows it."""
    if not _TENSOR_FILE.fullmatch(name):
        raise Malformed(f"{name[:80]!r} is not the name of a file with tensors")
    return name


def checked_shard(
    shape: tuple[int, ...], whole: tuple[int, ...], offset: tuple[int, ...], spacing: tuple[int, ...]
) -> Shard:
    """The part of a tensor of shape `whole` that these columns describe, if it is possible."""
    open_axis = whole[:1] == (OPEN,)
    lengths = whole[1:] if open_axis else whole
    if max(len(shape), len(whole), len(offset)) > MOST_AXES:
        raise Malformed(f"a tensor has more than {MOST_AXES} axes")
    if any(one < 0 for one in (*shape, *lengths, *offset)):
        raise Malformed("a shape or an offset has a negative number")
    box = len(shape) == len(whole) == len(offset)
    if not box and ((len(shape), len(offset)) != (1, 1) or spacing):
        raise Malformed(f"a part of shape {shape} at {offset} is no part of a tensor of shape {whole}")
    ends = [first + length for first, length in zip(offset, _extent(shape, spacing), strict=True)]
    if box:
        fits = all(end <= length for end, length in zip(ends, whole, strict=True) if length != OPEN)
    else:
        fits = open_axis or ends[0] <= prod(whole)
    if not fits:
        raise Malformed(f"a part of shape {shape} at {offset} goes beyond a tensor of shape {whole}")
    if prod(max(one, 1) for one in (*lengths, *(ends[:1] if open_axis else ()))) > MOST_ELEMENTS:
        raise Malformed(f"a tensor has more than {MOST_ELEMENTS} elements")
    if not spacing:
        return Shard(shape=shape, global_shape=whole, offset=offset)
    return Shard(shape=shape, global_shape=whole, offset=offset, spacing=(spacing[0], spacing[1]))


def _extent(shape: tuple[int, ...], spacing: tuple[int, ...]) -> tuple[int, ...]:
    """Lengths of the smallest box around a box whose rows may have gaps between them."""
    if not spacing:
        return shape
    if len(spacing) != 2 or not shape or not 0 < spacing[0] <= spacing[1] <= MOST_ELEMENTS or shape[0] % spacing[0]:
        raise Malformed(f"rows of a part of shape {shape} are spaced by {spacing[:3]}")
    together, apart = spacing
    return (max(0, shape[0] // together - 1) * apart + min(shape[0], together), *shape[1:])


def _check_exponents(column: pa.ListArray, counts: NDArray[np.int64]) -> None:
    lengths = np.diff(column.offsets.to_numpy())
    if not lengths.any():
        return
    if not np.isin(lengths, (0, NUM_EXPONENTS)).all():
        raise Malformed(f"a histogram of exponents has not {NUM_EXPONENTS} counts")
    histograms = _listed(column).reshape(-1, NUM_EXPONENTS)
    if (histograms < 0).any() or (histograms.astype(np.float64).sum(axis=1) > counts[lengths > 0]).any():
        raise Malformed("a histogram of exponents counts what is not there")


def _numbers(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    found: NDArray[Any] = batch.column(name).to_numpy(zero_copy_only=False)
    return found
