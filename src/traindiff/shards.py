"""Which elements of a global tensor an observation covers, and how positions map to the global index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

OPEN = -1
"""Length of an axis that is not known while recording: the batch axis, still growing with micro-steps."""

BUCKETS = 16
"""Number of row buckets and of column buckets in a profile."""

COLUMN_STEP = 16
"""Column buckets are a multiple of this many columns wide, so that a SIMD register never spans two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of a global tensor: a box, or a flat range of its elements in row-major order.

    The *global index* of an element is its position in the global tensor flattened in row-major
    order with the batch axis, if there is one, moved to the front. It does not depend on the
    length of axis 0, so it is known for every micro-batch before the last one has come.

    Attributes:
        shape: Shape of the part. One entry for a flat range.
        global_shape: Shape of the whole. Axis 0 is `OPEN` for a batch axis.
        offset: Where the part begins: one entry per axis of a box, one entry for a flat range.
        spacing: Of rows that do not lie one after the other, how many do, and how far it is from the first of these
            to the first of the next: `(1, 4)` for every fourth row. None where all do.
    """

    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    spacing: tuple[int, int] | None = None

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Shard:
        """All of a tensor of this shape."""
        return cls(shape=shape, global_shape=shape, offset=(0,) * len(shape))

    @classmethod
    def of_batch(cls, shape: tuple[int, ...], *, first: int, spacing: tuple[int, int] | None = None) -> Shard:
        """Rows `first`, `first + 1`, ... of a tensor whose axis 0 is the batch axis, or as `spacing` says."""
        offset = (first, *(0 for _ in shape[1:]))
        return cls(shape=shape, global_shape=(OPEN, *shape[1:]), offset=offset, spacing=spacing)

    @property
    def batched(self) -> bool:
        """Whether axis 0 is a batch axis."""
        return bool(self.global_shape) and self.global_shape[0] == OPEN

    @property
    def size(self) -> int:
        """Number of elements in the part."""
        return prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Steps of the global index per axis of the global tensor."""
        steps = [1]
        for length in reversed(self.global_shape[1:]):
            steps.append(steps[-1] * length)
        return tuple(reversed(steps[: len(self.global_shape)]))

    @property
    def start(self) -> int:
        """Global index of the part's first element."""
        if len(self.offset) != len(self.global_shape):
            return self.offset[0]  # a flat range of a tensor with several axes
        return sum(first * step for first, step in zip(self.offset, self.strides, strict=True))

    @property
    def contiguous(self) -> bool:
        """Whether the part is one run of global indices, in the order of its own elements."""
        if self.spacing and self.shape[0] > self.spacing[0] != self.spacing[1]:
            return False
        if len(self.shape) != len(self.global_shape) or len(self.shape) <= 1:
            return True
        partial_axes = [
            axis for axis, (part, whole) in enumerate(zip(self.shape, self.global_shape, strict=True)) if part != whole
        ]
        # Every axis before the last cut one must have length 1, or the runs would have gaps.
        return not partial_axes or prod(self.shape[: partial_axes[-1]]) <= 1

    def axes(self, memory: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Lengths, strides in memory and strides of the global index, axis by axis.

        Args:
            memory: Strides of the local tensor in memory, one per entry of `shape`.

        Returns:
            As `shape` has them; of spaced rows, two axes.
        """
        if len(self.shape) != len(self.global_shape):  # a flat range
            return self.shape, tuple(memory), (1,)
        if self.spacing is None:
            return self.shape, tuple(memory), self.strides
        together, apart = self.spacing
        (rows, *shape), (step, *inner), (index, *strides) = self.shape, memory, self.strides
        groups = rows // together
        return (
            (groups, together, *shape), (step * together, step, *inner), (index * apart, index, *strides)
        )  # fmt: skip

    @property
    def grid(self) -> Grid:
        """The rows and columns into which the profiles divide the global tensor."""
        shape = self.global_shape
        inner = shape[1:] if self.batched else shape
        if len(inner) <= 1:
            rows, columns = 1, inner[0] if inner else 1
        else:
            rows, columns = inner[0], prod(inner[1:])
        return Grid(
            columns=max(1, columns),
            row_block=max(1, -(-rows // BUCKETS)),
            column_block=COLUMN_STEP * max(1, -(-columns // (COLUMN_STEP * BUCKETS))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a rank's local tensor holds of one parameter: some of its elements, one after the other.

    An engine that flattens parameters into one tensor holds several in it, or parts of them.

    Attributes:
        path: Canonical path of the parameter.
        first: Where the elements begin in the local tensor, flattened.
        shard: Which elements of the parameter they are. None for all of them, and where the tensor says it itself.
    """

    path: str
    first: int = 0
    shard: Shard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How profiles bucket rows and columns.

    The element with global index i lies in row `i // columns` and column `i % columns`; its
    buckets are `(row // row_block) % 16` and `column // column_block`. Of a parameter the rows
    are axis 0 and the columns all other axes; of a batched tensor the rows are axis 1 (positions
    of a sequence, channels of an image) of every sample.
    """

    columns: int
    row_block: int
    column_block: int
