"""Whether the rows of a decoded record batch can be observations, before anything is computed from them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traindiff.core.observation import Merge
from traindiff.core.shards import OPEN, Shard
from traindiff.core.site import PHASES

MOST_AXES = 64
"""Axes of a tensor at most; torch has this limit too."""

MOST_ELEMENTS = 1 << 62
"""Elements of a tensor at most, axes of length 0 left out of the product."""

MOST_CHARACTERS = 1 << 20
"""Characters of a text at most."""

NUM_EXPONENTS = 320

_TENSOR_FILE = re.compile(r"tensors/step-\d{6,19}/\d{8,19}-[A-Za-z0-9._%~-]{1,200}\.[0-9a-f]{8}\.safetensors", re.ASCII)
_MERGES = frozenset(get_args(Merge))
_NOT_NEGATIVE = ("step", "micro_step", "call", "term", "count", "nan", "positive_infinity", "negative_infinity", "zero",
                 "negative", "subnormal", "sum_of_squares")  # fmt: skip
_APART = ("nan", "positive_infinity", "negative_infinity", "zero")
"""Counts of elements that are never the same ones."""


def check_columns(batch: pa.RecordBatch) -> None:
    """Refuse a batch that Arrow itself finds malformed, or whose values no observation has.

    Raises:
        Malformed: It is so.
    """
    with decoding():
        batch.validate(full=True)
    for name in _NOT_NEGATIVE:
        if (_numbers(batch, name) < 0).any():
            raise Malformed(f'column "{name}" has a negative number')
    factors = _numbers(batch, "factor")
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise Malformed('column "factor" has a number that is no factor')
    counts = _numbers(batch, "count")
    apart = sum((_numbers(batch, name).astype(np.float64) for name in _APART), np.zeros(len(counts)))
    if (apart > counts).any() or any((_numbers(batch, name) > counts).any() for name in ("negative", "subnormal")):
        raise Malformed("a tensor has more elements of one kind than elements")
    for name in ("step", "optimizer"):
        if len(batch.column(name).unique()) != 1:
            raise Malformed(f'column "{name}" differs between the rows of a step')
    for name, known in (("merge", _MERGES), ("phase", frozenset(PHASES))):
        if unknown := [one for one in batch.column(name).unique().to_pylist() if one not in known]:
            raise Malformed(f'column "{name}" holds {unknown[0][:80]!r}')
    _check_exponents(batch.column("exponents"), counts)


class Malformed(Exception):  # noqa: N818
    """A message is not one of a step; the text is a clause that says why."""


@contextmanager
def decoding() -> Iterator[None]:
    """Have what Arrow finds wrong end in `Malformed`."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, StopIteration) as error:
        raise Malformed(" ".join(str(error).split())[:300]) from None


def check_texts(texts: list[str]) -> list[str]:
    """The texts, if none is longer than one may be."""
    if (longest := max(map(len, texts), default=0)) > MOST_CHARACTERS:
        raise Malformed(f"a text has {longest} characters, and may have {MOST_CHARACTERS}")
    return texts


def check_tensor_file(name: str) -> str:
    """The name of a file with tensors, if it is one that the format has."""
    if not _TENSOR_FILE.fullmatch(name):
        raise Malformed(f"{name[:80]!r} is not the name of a file with tensors")
    return name


def checked_shard(
    shape: tuple[int, ...], whole: tuple[int, ...], offset: tuple[int, ...], spacing: tuple[int, ...]
) -> Shard:
    """The part of a tensor of shape `whole` that these columns describe, if there can be one."""
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
    """Lengths of the smallest box that holds a box whose rows may lie apart."""
    if not spacing:
        return shape
    if len(spacing) != 2 or not shape or not 0 < spacing[0] <= spacing[1] <= MOST_ELEMENTS or shape[0] % spacing[0]:
        raise Malformed(f"rows of a part of shape {shape} are spaced by {spacing[:3]}")
    together, apart = spacing
    return (max(0, shape[0] // together - 1) * apart + min(shape[0], together), *shape[1:])


def _check_exponents(column: pa.ListArray, counts: NDArray[np.int64]) -> None:
    lengths = np.diff(column.offsets.to_numpy())
    if not np.isin(lengths, (0, NUM_EXPONENTS)).all():
        raise Malformed(f"a histogram of exponents has not {NUM_EXPONENTS} counts")
    histograms = column.flatten().to_numpy().reshape(-1, NUM_EXPONENTS)
    if (histograms < 0).any() or (histograms.astype(np.float64).sum(axis=1) > counts[lengths > 0]).any():
        raise Malformed("a histogram of exponents counts what is not there")


def _numbers(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    found: NDArray[Any] = batch.column(name).to_numpy(zero_copy_only=False)
    return found
