"""The random signs of parameters, as tensors on the devices on which they are needed."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from traindiff.core.shards import Ranges, Region
from traindiff.core.witness import signs, signs_of


class Extent(NamedTuple):
    """The part of a parameter that a tensor holds. Axis 0 has the rows, all other axes flattened have the columns."""

    rows: Ranges
    columns: Ranges

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
        return cls(region.ranges[0], tuple((first * inner, length * inner) for first, length in region.ranges[1]))

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns."""
        rows, columns = (sum(length for _, length in ranges) for ranges in self)
        return rows, columns


class Probes:
    """Makes each tensor of signs once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, Ranges, torch.device, torch.dtype], Tensor] = {}

    def rows(self, path: str, extent: Extent, like: Tensor) -> Tensor:
        """Signs of the rows, on the device of a tensor; float32, or float64 for float64; shape (PROBES, rows)."""
        return self._signs(signs_of(path, "rows"), extent.rows, like)

    def columns(self, path: str, extent: Extent, like: Tensor) -> Tensor:
        """The same for the columns; shape (PROBES, columns)."""
        return self._signs(signs_of(path, "columns"), extent.columns, like)

    def row_factors(self, path: str, extent: Extent, like: Tensor) -> Tensor:
        """Signs of the rows as factors of products; float64, shape (rows, PROBES)."""
        return self._factors(signs_of(path, "rows"), extent.rows, like)

    def column_factors(self, path: str, extent: Extent, like: Tensor) -> Tensor:
        """The same for the columns; shape (columns, PROBES)."""
        return self._factors(signs_of(path, "columns"), extent.columns, like)

    def elements(self, path: str, extent: Extent, like: Tensor) -> Tensor:
        """The same for the elements, in row-major order: products of both; shape (PROBES, rows * columns)."""
        rows, columns = self.rows(path, extent, like), self.columns(path, extent, like)
        key = (f"elements {path}", (*extent.rows, *extent.columns), rows.device, rows.dtype)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = (rows[:, :, None] * columns[:, None, :]).flatten(1)
        return found

    def _signs(self, name: str, ranges: Ranges, like: Tensor) -> Tensor:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        key = (name, ranges, like.device, dtype)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = torch.from_numpy(_drawn(name, ranges).T.copy()).to(like.device, dtype)
        return found

    def _factors(self, name: str, ranges: Ranges, like: Tensor) -> Tensor:
        key = (f"factors {name}", ranges, like.device, torch.float64)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = torch.from_numpy(_drawn(name, ranges)).to(like.device, torch.float64)
        return found


def _drawn(name: str, ranges: Ranges) -> NDArray[np.int8]:
    return np.concatenate([signs(name, first, length) for first, length in ranges])
