"""The result of a check: how far each row of a product is from the exact one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

NUM_VECTORS = 4
"""Number of random vectors. With one, the error of a row with many small errors may cancel by chance."""

MOST_ELEMENTS = 2**23
"""Number of elements that are converted to float64 at a time: 64 MiB."""

_SEED = 0x7261696E

_MOST = 1e300
"""Largest error of a row that is told apart from others, in units of what its format allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """How far a product is from the exact one.

    Attributes:
        rows: The error of each row in units of what its format allows, float64, in the shape of the rows. NaN for rows
            that are not judged: an input or the output is not finite there.
        error: Error of the whole product, relative to its size: scalar, float64.
        allowed: The largest such error that its format allows: scalar, float64.
    """

    rows: Tensor
    error: Tensor
    allowed: Tensor

    def in_shape(self, shape: Sequence[int]) -> Residual:
        """The same, with its rows in another shape."""
        return replace(self, rows=self.rows.reshape(tuple(shape)))

    @property
    def worst(self) -> Tensor:
        """Index of the row that is furthest off, of all rows counted in row-major order: scalar, float64."""
        return self.rows.reshape(-1).nan_to_num(nan=-1.0).argmax().to(torch.float64)

    @property
    def median(self) -> Tensor:
        """Median of `rows` without those that are exact, e.g. of zeros: scalar, float64; 0 if all are exact."""
        flat = self.rows.reshape(-1)
        return torch.where(flat > 0, flat, torch.nan).nanmedian().nan_to_num(nan=0.0)


def residual(errors: Tensor, bounds: Tensor, sizes: Tensor, terms: Tensor) -> Residual:
    """The result of a check, from norms of rows, float64, one element per row.

    Args:
        errors: The errors.
        bounds: The largest errors that rounding explains.
        sizes: The exact product.
        terms: The root of the sum of the squares of the terms: the size of a product whose terms cancel.
    """
    known = errors.isfinite() & bounds.isfinite() & sizes.isfinite()
    error, bound, *wholes = (torch.where(known, one, 0.0).norm() for one in (errors, bounds, sizes, terms))
    size = torch.maximum(*wholes)
    return Residual(
        rows=torch.where(known, (errors / bounds).clamp_max(_MOST), torch.nan),
        error=_ratio(error, size),
        allowed=_ratio(bound, size),
    )


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Their ratio; 0 if both are 0."""
    return torch.where(part > 0, part / whole, 0.0)


def zeros(shape: Sequence[int], device: torch.device) -> Tensor:
    """Zeros, float64."""
    return torch.zeros(tuple(shape), dtype=torch.float64, device=device)


def signs(count: int, device: torch.device) -> Tensor:
    """Random signs, float64, shape (count, NUM_VECTORS): always the same ones, from a generator of their own."""
    generator = torch.Generator(device=device)
    generator.manual_seed(_SEED + count)
    drawn = torch.randint(0, 2, (count, NUM_VECTORS), generator=generator, device=device)
    return 2.0 * drawn.to(torch.float64) - 1.0


def norms(projected: Tensor) -> Tensor:
    """Norms of rows, estimated from their products with random signs (the last axis)."""
    return projected.square().mean(-1).sqrt()
