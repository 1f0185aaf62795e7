"""The random signs of parameters, as tensors on the devices on which they are needed."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from traindiff.core.shards import Ranges, Region
from traindiff.core.witness import signs


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
        self._made: dict[tuple[str, str, Ranges, torch.device, torch.dtype], Tensor] = {}

    def rows(self, path: str, extent: Extent, like: Tensor) -> Tensor:
        """Signs of the rows, on the device of a tensor; float32, or float64 for float64; shape (rows, PROBES)."""
        return self._signs(path, "rows", extent.rows, like)

    def columns(self, path: str, extent: Extent, like: Tensor) -> Tensor:
        """The same for the columns; shape (columns, PROBES)."""
        return self._signs(path, "columns", extent.columns, like)

    def _signs(self, path: str, side: str, ranges: Ranges, like: Tensor) -> Tensor:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        key = (path, side, ranges, like.device, dtype)
        found = self._made.get(key)
        if found is None:
            held = np.concatenate([signs(path, side, first, length) for first, length in ranges])
            # Probe after probe in memory: products with so few columns are several times as fast then.
            found = self._made[key] = torch.from_numpy(held.T.copy()).to(like.device, dtype).T
        return found
