"""The signs of a whole gradient, from what was kept of its shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.shards import Shard

Mask = NDArray[np.bool_]
Stored = Mapping[str, NDArray[np.generic]]
"""What was kept of an observation in a file of its own, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """The signs of a tensor's elements, one axis, in row-major order.

    Attributes:
        positive: Where x > 0.
        zero: Where x is zero; None where it is not known which of the elements that are not positive are.
        nan: Where x is NaN; as far as that is known.
    """

    positive: Mask
    zero: Mask | None
    nan: Mask

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.positive.size


def part_signs(stored: Stored, summary: Any, size: int) -> Signs | None:
    """The signs of one observation.

    Args:
        stored: What was kept of it. Nothing is, of a scalar: its summary says it.
        summary: Its summary.
        size: Number of elements.

    Returns:
        None where no signs were kept.
    """
    if "positive" not in stored:
        if size > 1 or not int(summary["count"]):
            return None if size else Signs(positive=_none(0), zero=_none(0), nan=_none(0))
        above = bool(summary["positive_infinity"]) or float(summary["sum"]) > 0
        return Signs(
            positive=np.array([above]), zero=np.array([bool(summary["zero"])]), nan=np.array([bool(summary["nan"])])
        )
    positive = _unpacked(stored["positive"], size)
    if "signless" not in stored:  # another tool kept no more
        return Signs(positive=positive, zero=None, nan=_none(size))
    signless = _unpacked(stored["signless"], size)
    nan = _unpacked(stored["nan"], size) if "nan" in stored else _none(size)
    return Signs(positive=positive, zero=signless & ~nan, nan=nan)


def merged(parts: Iterable[tuple[Shard, Signs]], shape: tuple[int, ...]) -> Signs | None:
    """The signs of a tensor of this shape from those of its shards; None where elements are missing.

    Args:
        parts: Boxes and flat ranges; of elements that several hold, the last one's count.
        shape: Of the whole tensor.
    """
    held = list(parts)
    if len(held) == 1 and held[0][0].shape == shape:
        return held[0][1]
    size = prod(shape)
    if sum(shard.size for shard, _ in held) < size:  # before anything of that size is made
        return None
    there, positive, zero, nan = (_none(size) for _ in range(4))
    zeros_known = True
    for shard, signs in held:
        zeros_known &= signs.zero is not None
        kinds = (
            (there, np.ones(shard.size, np.bool_)),
            (positive, signs.positive),
            (nan, signs.nan),
            (zero, signs.zero),
        )
        for whole, part in kinds:
            if part is not None:
                _place(whole, shape, shard, part)
    return Signs(positive=positive, zero=zero if zeros_known else None, nan=nan) if there.all() else None


def _place(whole: Mask, shape: tuple[int, ...], shard: Shard, part: Mask) -> None:
    """Put the elements of a shard where they belong in the flat tensor."""
    if len(shard.shape) != len(shape) or len(shape) == 1:  # a flat range
        whole[shard.offset[0] : shard.offset[0] + shard.size] = part
        return
    box = tuple(slice(first, first + length) for first, length in zip(shard.offset, shard.shape, strict=True))
    whole.reshape(shape)[box] = part.reshape(shard.shape)


def _unpacked(bits: NDArray[Any], size: int) -> Mask:
    if not bits.size:
        return _none(size)
    return np.unpackbits(np.ascontiguousarray(bits), count=size, bitorder="little").view(np.bool_)


def _none(size: int) -> Mask:
    return np.zeros(size, dtype=np.bool_)
