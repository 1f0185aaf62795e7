"""Parts of a global tensor: those that users declare, those that ranks hold, and the global index of elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from traindiff.errors import Problem

_FIX = 'Write shards=[traindiff.shard("*.attention.core", dim=1, axis="tp"), ...].'


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredShard:
    """Declaration of how some tensors are divided along one axis of a device mesh; `shard` makes it."""

    pattern: str
    dim: int | None
    axis: Any
    blocks: int = 1
    partial: bool = False

    @property
    def axis_name(self) -> str:
        """Name of the axis for messages."""
        if isinstance(self.axis, str):
            return self.axis
        names = getattr(self.axis, "mesh_dim_names", None)
        return str(names[0]) if names else type(self.axis).__name__

    def __str__(self) -> str:
        dim = "partial=True" if self.partial else f"dim={self.dim}"
        return f'shard("{self.pattern}", {dim}, axis="{self.axis_name}")'


def shard(pattern: str, *, dim: int | None = None, axis: Any, blocks: int = 1, partial: bool = False) -> DeclaredShard:
    """Declare which part of a global tensor each rank holds in a plain tensor, for `record(shards=...)`.

    ```python
    traindiff.record(path, model, optimizer, shards=[
        traindiff.shard("*.qkv", dim=-1, axis=tp, blocks=3),          # its output, and the gradient of it
        traindiff.shard("*.qkv.weight", dim=0, axis=tp, blocks=3),    # value, gradient, optimizer state
        traindiff.shard("*.proj", partial=True, axis=tp),             # a term of a sum, before the all-reduce
    ])
    ```

    If several declarations for one axis match a tensor, the first one counts. Declarations for several axes are
    applied one after the other. All ranks are assumed to hold equally long parts.

    Args:
        pattern: Glob over canonical paths of modules (`"(root)"` for the model, and its inputs), or over a path and a
            slot (`"attention output[1]"`). A glob that matches no module is tried on parameters.
        dim: Dim that is divided; None if each rank has all of the tensor.
        axis: Ranks over which it is divided: the name of an axis of the model's DeviceMesh, a DeviceMesh with one
            axis, or a process group.
        blocks: Number of equal blocks of the dim, each of which is divided separately: 3 for queries, keys and values
            in one tensor.
        partial: Whether each rank has a term of a sum instead of a part.

    Returns:
        The declaration, for the list that `record(shards=...)` takes. It is checked there.
    """
    return DeclaredShard(pattern=pattern, dim=dim, axis=axis, blocks=blocks, partial=partial)


def checked_shards(value: object, problems: list[Problem]) -> tuple[DeclaredShard, ...]:
    """The declarations that the user listed; appends to `problems` what is wrong with them."""
    if isinstance(value, DeclaredShard):
        value = [value]
    if not isinstance(value, Iterable) or isinstance(value, str):
        what = "must be a list of declarations."
        problems.append(Problem(where=f"record(shards={value!r})", what=what, fix=_FIX))
        return ()
    found = tuple(value)
    for one in found:
        if not isinstance(one, DeclaredShard):
            what = f"has {one!r}, which is no declaration."
            problems.append(Problem(where="record(shards=...)", what=what, fix=_FIX))
        else:
            problems += _problems(one)
    return tuple(one for one in found if isinstance(one, DeclaredShard))


def _problems(one: DeclaredShard) -> list[Problem]:
    found: list[tuple[str, str]] = []
    if not isinstance(one.pattern, str) or not one.pattern:
        found.append(("is no pattern over paths of modules or parameters.", _FIX))
    if one.dim is not None and (not isinstance(one.dim, int) or isinstance(one.dim, bool)):
        fix = "Write a whole number, e.g. dim=1, or leave it out where each rank has all of the tensor."
        found.append((f"has dim={one.dim!r}, which is no dim of a tensor.", fix))
    if one.partial and one.dim is not None:
        what = f"is partial and has dim={one.dim}: a term of a sum has all elements."
        found.append((what, f"Write either dim={one.dim} or partial=True."))
    if not isinstance(one.blocks, int) or one.blocks < 1:
        fix = "Write of how many equal blocks the dim consists, e.g. blocks=3, or leave it out."
        found.append((f"has blocks={one.blocks!r}, which is no number of blocks.", fix))
    where = f"record(shards=...), {one.pattern!r}"
    return [Problem(where=where, what=what, fix=fix) for what, fix in found]


Ranges = tuple[tuple[int, int], ...]
"""First index and length of one or more ranges, in the order in which a local tensor holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a local tensor that is one box of the global one.

    Attributes:
        first: Its first index in the local tensor, by axis.
        offset: Its first index in the global tensor, by axis.
        shape: Its shape.
    """

    first: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The elements of a global tensor that a local tensor holds: the product of some ranges of each axis.

    Attributes:
        shape: Shape of the global tensor.
        ranges: By axis, the ranges that the local tensor has.
        term: Number of the term, if ranks hold terms of a sum; None if they hold elements.
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
        """True if the local tensor is all of the global one."""
        return self.term is None and self.local_shape == self.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return tuple(sum(length for _, length in ranges) for ranges in self.ranges)

    def cut(self, dim: int, *, size: int, index: int, blocks: int = 1) -> Region:
        """Part `index` of `size` along `dim`, as `torch.chunk` makes them: equally long, except the last ones.

        Args:
            dim: Axis, from 0.
            size: Number of parts.
            index: Number of the part.
            blocks: Number of blocks into which the axis is divided first; each is then cut separately: 3 for queries,
                keys and values in one tensor.
        """
        pieces = [piece for block in _chunks(self.ranges[dim], blocks) for piece in _chunks(block, size)[index]]
        kept = tuple((first, length) for first, length in pieces if length) or ((self.shape[dim], 0),)
        return replace(self, ranges=(*self.ranges[:dim], kept, *self.ranges[dim + 1 :]))

    def summed(self, *, size: int, index: int) -> Region:
        """Term `index` of the `size` terms of a sum into which the region is divided."""
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
    """Regions of an activation and of its gradient. A term of a sum has the gradient of the sum."""

    value: Region
    gradient: Region


def _chunks(ranges: Ranges, count: int) -> list[Ranges]:
    """The ranges, one after the other, in `count` parts."""
    total = sum(length for _, length in ranges)
    step = -(-total // count)
    return [_between(ranges, min(part * step, total), min((part + 1) * step, total)) for part in range(count)]


def _between(ranges: Ranges, first: int, end: int) -> Ranges:
    """The ranges from position `first` to `end`, counted along them."""
    found, passed = [], 0
    for offset, length in ranges:
        low, high = max(first - passed, 0), min(end - passed, length)
        if low < high:
            found.append((offset + low, high - low))
        passed += length
    return tuple(found)


OPEN = -1
"""Length of the batch axis, which is not known while recording: it grows with each micro-step."""

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
        offset: First index of the part: one entry per axis of a box, one entry for a flat range.
        spacing: For rows with gaps between groups of them: rows in a group, and distance from one group to the
            next. `(1, 4)` is every fourth row. None for rows without gaps.
    """

    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    spacing: tuple[int, int] | None = None

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Shard:
        """All of a tensor of this shape."""
        return _whole(tuple(shape))

    @classmethod
    def of_batch(cls, shape: tuple[int, ...], *, first: int, spacing: tuple[int, int] | None = None) -> Shard:
        """Rows `first`, `first + 1`, ... of a tensor whose axis 0 is the batch axis, or as `spacing` says."""
        return _of_batch(shape, first, spacing)

    @property
    def batched(self) -> bool:
        """True if axis 0 is a batch axis."""
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
        """True if the part is one run of global indices, in the order of its own elements."""
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
            One entry per entry of `shape`, and two for spaced rows.
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
        return _grid(self.global_shape)


@lru_cache(maxsize=1 << 14)
def _grid(shape: tuple[int, ...]) -> Grid:
    inner = shape[1:] if shape[:1] == (OPEN,) else shape
    if len(inner) <= 1:
        rows, columns = 1, inner[0] if inner else 1
    else:
        rows, columns = inner[0], prod(inner[1:])
    return Grid(
        columns=max(1, columns),
        row_block=max(1, -(-rows // BUCKETS)),
        column_block=COLUMN_STEP * max(1, -(-columns // (COLUMN_STEP * BUCKETS))),
    )


@lru_cache(maxsize=1 << 14)
def _whole(shape: tuple[int, ...]) -> Shard:
    return Shard(shape=shape, global_shape=shape, offset=(0,) * len(shape))


@lru_cache(maxsize=1 << 14)
def _of_batch(shape: tuple[int, ...], first: int, spacing: tuple[int, int] | None) -> Shard:
    offset = (first, *(0 for _ in shape[1:]))
    return Shard(shape=shape, global_shape=(OPEN, *shape[1:]), offset=offset, spacing=spacing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive elements of a local tensor that belong to one parameter.

    An engine that flattens parameters into one tensor holds several parameters, or parts of them, in it.

    Attributes:
        path: Canonical path of the parameter.
        first: Position of the first element in the flattened local tensor.
        shard: Their place in the parameter. None for all of it, or if the tensor itself describes it.
    """

    path: str
    first: int = 0
    shard: Shard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How profiles bucket rows and columns.

    The element with global index i lies in row `i // columns` and column `i % columns`; its
    buckets are `(row // row_block) % 16` and `column // column_block`. The rows of a parameter
    are axis 0, and its columns all other axes. The rows of a batched tensor are axis 1 (positions of a
    sequence, channels of an image) of every sample.
    """

    columns: int
    row_block: int
    column_block: int
