"""Split a strided tensor, or a box of a larger one, into runs that are contiguous on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Equally spaced runs of elements.

    Attributes:
        memory: Where the first run begins, in elements after the tensor's first.
        index: Its global index, after the shard's first.
        count: Number of runs.
        length: Elements in each.
        memory_step: From one run to the next, in elements of memory.
        index_step: The same, in global indices.
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
    """All elements of a box, as few times equally spaced runs as possible.

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
    """(length, memory stride, index stride) per axis, where neighbours that continue each other are one."""
    axes: list[tuple[int, int, int]] = []
    for length, step, index_step in zip(shape, memory, index, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1:] == (step * length, index_step * length):
            axes[-1] = (axes[-1][0] * length, step, index_step)
        else:
            axes.append((length, step, index_step))
    return axes
