"""Parts of a tensor of limited size, so that a tensor that must be copied is copied part by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from traindiff.core.shards import Shard

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Equally spaced runs of elements.

    Attributes:
        memory: First element of the first run, in elements after the tensor's first.
        index: Its global index, relative to the shard's first.
        count: Number of runs.
        length: Elements in each run.
        memory_step: Distance from one run to the next, in elements of memory.
        index_step: The same distance in global indices.
    """

    memory: int
    index: int
    count: int
    length: int
    memory_step: int
    index_step: int


def run_length(shape: Sequence[int], memory: Sequence[int], index: Sequence[int]) -> int:
    """Length of the runs of `runs`."""
    axes = _joined(shape, memory, index)
    return axes[-1][0] if axes and axes[-1][1:] == (1, 1) else 1


def runs(shape: Sequence[int], memory: Sequence[int], index: Sequence[int]) -> Iterator[Runs]:
    """All elements of a box as groups of equally spaced runs, as few groups as possible.

    Args:
        shape: Lengths of its axes, none of them 0.
        memory: Strides of its axes in memory, in elements.
        index: Strides of its axes in the global index.
    """
    axes = _joined(shape, memory, index)
    length = 1
    if axes and axes[-1][1:] == (1, 1):
        length = axes.pop()[0]
    *outer, inner = axes or [(1, 0, 0)]
    for place in product(*(range(size) for size, _, _ in outer)):
        yield Runs(
            memory=sum(number * step for number, (_, step, _) in zip(place, outer, strict=True)),
            index=sum(number * step for number, (_, _, step) in zip(place, outer, strict=True)),
            count=inner[0],
            length=length,
            memory_step=inner[1],
            index_step=inner[2],
        )


def _joined(shape: Sequence[int], memory: Sequence[int], index: Sequence[int]) -> list[tuple[int, int, int]]:
    """(length, memory stride, index stride) per axis; neighboring axes that continue each other are joined."""
    axes: list[tuple[int, int, int]] = []
    for length, step, index_step in zip(shape, memory, index, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1:] == (step * length, index_step * length):
            axes[-1] = (axes[-1][0] * length, step, index_step)
        else:
            axes.append((length, step, index_step))
    return axes


MOST = 1 << 20
"""Elements of a part: 8 MiB in float64, and as much again for their global indices."""


def parts_of(tensor: Tensor, shard: Shard, most: int = MOST) -> Iterator[tuple[Tensor, Shard]]:
    """Views of a tensor that together hold each element once; nothing is copied.

    Args:
        tensor: Real, any strides.
        shard: Which elements of the global tensor it holds: a box of its shape, or a flat range.
        most: Limit for the elements of a view.

    Returns:
        Views and their shards; the tensor itself if it is not larger than `most`. Their summaries merge to the summary
        of the tensor.
    """
    shape = tuple(tensor.shape)
    if prod(shape) <= most:
        yield tensor, shard
        return
    is_box = shape == shard.shape
    # The axis with the largest stride is divided first, so that a part is compact in memory and is copied fast.
    axes = sorted(range(len(shape)), key=tensor.stride, reverse=True) if is_box else range(len(shape))
    together = shard.spacing[0] if is_box and shard.spacing else 0
    for spans in _divided([(0, length) for length in shape], axes, most, together):
        held = _of_box(shard, spans) if is_box else _of_range(shard, shape, spans)
        yield tensor[tuple(slice(first, last) for first, last in spans)], held


Spans = Sequence[tuple[int, int]]
"""First element, and the one after the last, of each axis."""


def _divided(spans: Spans, axes: Sequence[int], most: int, together: int) -> Iterator[Spans]:
    """Divide a box into boxes of at most `most` elements.

    Args:
        spans: The box.
        axes: Axes that may be divided, in this order.
        most: Limit for the elements of a part.
        together: Rows of axis 0 in a group without gaps; 0 if there are no gaps at all. A part has either some rows
            of one group or several whole groups.
    """
    size = prod(last - first for first, last in spans)
    if size <= most:
        yield spans
        return
    axis, *others = axes
    length = spans[axis][1]
    step = max(1, most // (size // length))
    group = together if axis == 0 else 0
    if group and step > group:
        step -= step % group
    first = 0
    while first < length:
        last = min(first + step, length)
        if group and step < group:
            last = min(last, first - first % group + group)
        part = [*spans[:axis], (first, last), *spans[axis + 1 :]]
        yield from _divided(part, others, most, together)
        first = last


def _of_box(shard: Shard, spans: Spans) -> Shard:
    """The shard of a part of a box."""
    shape = tuple(last - first for first, last in spans)
    starts = [first for first, _ in spans]
    spacing = shard.spacing
    if spacing is not None:
        together, apart = spacing
        starts[0] = starts[0] // together * apart + starts[0] % together
        spacing = spacing if shape[0] > together else None
    if len(shard.offset) != len(shape):  # a range of a tensor with several axes
        return Shard(shape=shape, global_shape=shard.global_shape, offset=(shard.offset[0] + starts[0],))
    offset = tuple(before + start for before, start in zip(shard.offset, starts, strict=True))
    return Shard(shape=shape, global_shape=shard.global_shape, offset=offset, spacing=spacing)


def _of_range(shard: Shard, shape: Sequence[int], spans: Spans) -> Shard:
    """The shard of a part of a tensor whose elements, in row-major order, are a flat range."""
    size = prod(last - first for first, last in spans)
    before = sum(first * prod(shape[axis + 1 :]) for axis, (first, _) in enumerate(spans))
    return Shard(shape=(size,), global_shape=shard.global_shape, offset=(shard.offset[0] + before,))
