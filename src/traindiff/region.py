"""Where a rank's local tensor lies in the global tensor: along each axis, some ranges of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

Ranges = tuple[tuple[int, int], ...]
"""First index and length of each of several ranges, in the order in which a local tensor holds them; at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a local tensor that is one box of the global one.

    Attributes:
        first: Where it begins in the local tensor, by axis.
        offset: Where it begins in the global tensor.
        shape: Its shape.
    """

    first: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Which elements of a global tensor a local tensor holds: the product of some ranges of each axis.

    Attributes:
        shape: Shape of the global tensor.
        ranges: By axis, what of it the local tensor has.
        term: Where ranks hold terms of a sum, which of them this is; None where they hold elements.
    """

    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    term: int | None = None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a tensor."""
        return cls(shape=tuple(shape), ranges=tuple(((0, length),) for length in shape))

    @property
    def is_whole(self) -> bool:
        """Whether the local tensor is all of the global one."""
        return self.term is None and self.local_shape == self.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return tuple(sum(length for _, length in ranges) for ranges in self.ranges)

    def cut(self, dim: int, *, size: int, index: int, blocks: int = 1) -> Region:
        """Part `index` of `size` along `dim`, as `torch.chunk` makes them: all of one length, the last ones shorter.

        Args:
            dim: Axis, from 0.
            size: Number of parts.
            index: Which of them.
            blocks: Into how many blocks the axis is divided first, each of which is then cut by itself: 3 for
                queries, keys and values in one tensor.
        """
        pieces = [piece for block in _chunks(self.ranges[dim], blocks) for piece in _chunks(block, size)[index]]
        kept = tuple((first, length) for first, length in pieces if length) or ((self.shape[dim], 0),)
        return replace(self, ranges=(*self.ranges[:dim], kept, *self.ranges[dim + 1 :]))

    def summed(self, *, size: int, index: int) -> Region:
        """Term `index` of the `size` terms into which this is divided."""
        return replace(self, term=(self.term or 0) * size + index)

    def batch_first(self, axis: int) -> Region:
        """The region of the tensor with the given axis in front."""
        axis %= len(self.shape) or 1
        order = [axis, *(dim for dim in range(len(self.shape)) if dim != axis)] if axis else range(len(self.shape))
        return replace(
            self, shape=tuple(self.shape[dim] for dim in order), ranges=tuple(self.ranges[dim] for dim in order)
        )

    def boxes(self) -> Iterator[Box]:
        """The boxes of which the local tensor consists."""
        starts = []
        for ranges in self.ranges:
            first, held = 0, []
            for offset, length in ranges:
                held.append((first, offset, length))
                first += length
            starts.append(held)
        for box in product(*starts):
            yield Box(
                first=tuple(first for first, _, _ in box),
                offset=tuple(offset for _, offset, _ in box),
                shape=tuple(length for _, _, length in box),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """Where an activation lies, and where its gradient does: of terms of a sum, each has the gradient of the sum."""

    value: Region
    gradient: Region


def _chunks(ranges: Ranges, count: int) -> list[Ranges]:
    """The ranges, one after the other, in `count` parts."""
    total = sum(length for _, length in ranges)
    step = -(-total // count)
    return [_between(ranges, min(part * step, total), min((part + 1) * step, total)) for part in range(count)]


def _between(ranges: Ranges, first: int, end: int) -> Ranges:
    """What lies from `first` to `end`, counted along the ranges."""
    found, passed = [], 0
    for offset, length in ranges:
        low, high = max(first - passed, 0), min(end - passed, length)
        if low < high:
            found.append((offset + low, high - low))
        passed += length
    return tuple(found)
