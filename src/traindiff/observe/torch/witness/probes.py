"""The random signs of parameters, as tensors on the devices on which they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from traindiff.core.shards import Ranges, Region
from traindiff.core.witness import signs, signs_of


class Extent(NamedTuple):
    """The part of a parameter that a tensor holds. Axis 0 has the rows, all other axes flattened have the columns.

    Attributes:
        rows: Ranges of rows.
        columns: Ranges of columns.
        inner: Of a parameter with three axes, the size of the last one; 0 for others. The sign of a column is then the
            product of a sign for each of its two axes, so a stack of matrices is checked as each of them would be.
    """

    rows: Ranges
    columns: Ranges
    inner: int = 0

    @classmethod
    def of(cls, region: Region) -> Extent | None:
        """The extent of a region; None if axes behind the second are divided."""
        if not region.shape:
            return cls(((0, 1),), ((0, 1),))
        if len(region.shape) == 1:
            return cls(region.ranges[0], ((0, 1),))
        inner = prod(region.shape[2:])
        if region.local_shape[2:] != region.shape[2:]:
            return None
        columns = tuple((first * inner, length * inner) for first, length in region.ranges[1])
        return cls(region.ranges[0], columns, inner_axis(region.shape))

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns."""
        rows, columns = (sum(length for _, length in ranges) for ranges in self[:2])
        return rows, columns


def inner_axis(shape: Sequence[int]) -> int:
    """See `Extent.inner`, for the whole shape of a parameter."""
    return shape[2] if len(shape) == 3 else 0


class Probes:
    """Makes each tensor of signs once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, Ranges, int, torch.device, torch.dtype], Tensor] = {}

    def rows(self, path: str, extent: Extent, like: Tensor) -> Tensor:
        """Signs of the rows, on the device of a tensor; float32, or float64 for float64; shape (PROBES, rows)."""
        return self._signs(signs_of(path, "rows"), extent.rows, like)

    def columns(self, path: str, extent: Extent, like: Tensor) -> Tensor:
        """The same for the columns; shape (PROBES, columns)."""
        return self._signs(signs_of(path, "columns"), extent.columns, like, extent.inner)

    def row_factors(self, path: str, extent: Extent, like: Tensor) -> Tensor:
        """Signs of the rows as factors of products; float64, shape (rows, PROBES)."""
        return self._factors(signs_of(path, "rows"), extent.rows, like)

    def column_factors(self, path: str, extent: Extent, like: Tensor) -> Tensor:
        """The same for the columns; shape (columns, PROBES)."""
        return self._factors(signs_of(path, "columns"), extent.columns, like, extent.inner)

    def elements(self, path: str, extent: Extent, like: Tensor) -> Tensor:
        """The same for the elements, in row-major order: products of both; shape (PROBES, rows * columns)."""
        rows, columns = self.rows(path, extent, like), self.columns(path, extent, like)
        key = (f"elements {path}", (*extent.rows, *extent.columns), extent.inner, rows.device, rows.dtype)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = (rows[:, :, None] * columns[:, None, :]).flatten(1)
        return found

    def axes(self, path: str, extent: Extent, like: Tensor) -> tuple[Tensor, Tensor]:
        """The same for the two axes of the columns of a stack of matrices, all of which are here."""
        name = signs_of(path, "columns")
        size = extent.shape[1] // extent.inner
        return self._signs(name, ((0, size),), like), self._signs(_inner(name), ((0, extent.inner),), like)

    def _signs(self, name: str, ranges: Ranges, like: Tensor, inner: int = 0) -> Tensor:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        key = (name, ranges, inner, like.device, dtype)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = torch.from_numpy(_drawn(name, ranges, inner).T.copy()).to(like.device, dtype)
        return found

    def _factors(self, name: str, ranges: Ranges, like: Tensor, inner: int = 0) -> Tensor:
        key = (f"factors {name}", ranges, inner, like.device, torch.float64)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = torch.from_numpy(_drawn(name, ranges, inner)).to(like.device, torch.float64)
        return found


def _drawn(name: str, ranges: Ranges, inner: int) -> NDArray[np.int8]:
    if not inner:
        return np.concatenate([signs(name, first, length) for first, length in ranges])
    columns = np.concatenate([np.arange(first, first + length) for first, length in ranges])
    outer = signs(name, 0, int(columns.max(initial=0)) // inner + 1)
    found: NDArray[np.int8] = outer[columns // inner] * signs(_inner(name), 0, inner)[columns % inner]
    return found


def _inner(name: str) -> str:
    """The name of the signs of the last of three axes."""
    return f"inner {name}"
