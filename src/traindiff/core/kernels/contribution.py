"""What one use of a parameter contributes to its gradient, with the error that rounding explains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from traindiff.core.kernels.registry import CONTRIBUTIONS, installed
from traindiff.core.summary import UNIT_ROUNDOFF
from traindiff.core.witness import PROBES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SHORT = 0.25
"""Part of the squared error of a sum over rows in a short dtype: rounding to nearest, of sums that grow."""

STUCK = 2.5
"""The same for more than 1 / unit roundoff rows: small terms change the sum no more. CPU kernels of LayerNorm and
Embedding lose so much of a gradient whose terms have one sign (measured: up to 0.93 of it, over 16,384 rows)."""

DRIFT = 0.25
"""A sum of n equal terms rounds in the same direction again and again: the most that it loses, as a share of n u."""

SHIFT = 2.0
"""Error of the mean of a normalization, in roundings of it. On the CPU it was measured to stay below 0.7."""

SHORTEST_EXACT = UNIT_ROUNDOFF["float32"]
"""Sums with this unit roundoff, or a smaller one, lose nothing of their terms beside it."""


class Rounding(NamedTuple):
    """How a contribution is rounded.

    Attributes:
        sums: Unit roundoff of the sum over rows.
        exact: The same of the witness's own sums.
        width: Numbers that are added up for one probe of one row.
        result: Unit roundoff of the dtype in which the gradient is computed.
        operand: Unit roundoff of the conversion of the inputs; 0 without one.
        smallest: Below it, an element of the gradient is lost.
        size: Number of elements of the parameter.
    """

    sums: float
    exact: float
    width: int
    result: float
    operand: float
    smallest: float
    size: int


def contribution(totals: Tensor, rows: int | Tensor, shift: float | Tensor, by: Rounding) -> Tensor:
    """The vector of one use, laid out as `traindiff.core.witness` says; the errors are squared.

    Each element of the gradient is a sum of n terms, added up with the unit roundoff u. If roundings are
    independent of each other, the error of a sum S has the root mean square `sqrt(n) u S`. They are not where terms
    repeat: then each is rounded in the same direction, until S has doubled. n equal terms lose up to `n u S / 4`.
    If terms come in runs of L equal ones, n / L such errors are independent of each other: `sqrt(n L) u S / 4`.
    Terms of unlike rows have `sum((t[i] - t[i - 1])²) = 2 sum(t²)`, and runs of L have 1 / L of it, which tells L.

    A normalization multiplies g by `(x - mean) * scale`. The rounding of the mean, and of `mean * scale` where a
    kernel computes `x * scale - mean * scale`, shifts the product by up to `u |mean| scale` for each rounding. This
    does not become smaller where x is near its mean, and all rows that share a mean share the error: those of a
    channel of BatchNorm, or all rows if each of them is the same constant. So it is added up as a sum over n terms
    of one sign: with `(sum of t)² <= n sum(t²)`, it is `sqrt(n) u` times the root of `shift`.

    Args:
        totals: Sums of the terms for each probe, of their squares, and of the squares of differences between those of
            neighboring rows, as `projection.summed` gives them.
        rows: Number n of terms that are added up to each element of the gradient.
        shift: Of a normalization: the sum over all elements of `(g mean scale)²`.
        by: How they are rounded.

    Returns:
        float64, shape (8,), on the device of `totals`, without waiting for it.
    """
    numbers: Any
    combined: Callable[[Any], Tensor]
    if totals.device.type == "cpu":  # where arithmetic in Python is faster
        numbers, combined = totals.tolist(), _tensor
        rows, shift = int(rows), float(shift)
    else:
        for device_types, kernel in installed(CONTRIBUTIONS):
            if totals.device.type in device_types:
                found: Tensor = kernel.contribution(totals, rows, shift, by)
                return found
        numbers, combined = totals.unbind(), torch.stack
    *sums, squares, changes = numbers
    mean = sum(one * one for one in sums) / PROBES
    growth = by.sums**2 * rows * (_share(by.sums, rows) + DRIFT**2 * _excess(rows, squares, changes))
    terms = (growth + by.exact**2 * by.width) * (squares / PROBES) + (SHIFT * by.sums) ** 2 * rows * shift
    rounded = by.result**2 * mean + by.smallest**2 * by.size
    return combined([*sums, growth * mean, by.operand**2 * squares / PROBES, rounded, terms])


def _share(sums: float, rows: Any) -> Any:
    """The part of the squared error of a sum over rows that counts."""
    return 1.0 if sums <= SHORTEST_EXACT else SHORT + (STUCK - SHORT) * (sums * rows > 1.0)


def _excess(rows: Any, squares: Any, changes: Any) -> Any:
    """Length of the runs of equal terms among `rows` terms, less the one that each has; numbers, or scalars."""
    if isinstance(squares, torch.Tensor):
        return (2.0 * squares / changes.clamp_min(torch.finfo(torch.float64).tiny)).clamp_min(1.0).clamp_max(rows) - 1.0
    return min(max(1.0, 2.0 * squares / changes), float(rows)) - 1.0 if changes and rows else 0.0


def _tensor(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")
