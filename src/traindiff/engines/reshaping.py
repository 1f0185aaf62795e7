"""Where a part of a tensor lies after its dims were split, merged, or put in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from traindiff.region import Ranges, Region

MOST_RANGES = 256
"""Ranges of a merged axis: each is a summary of its own, which 256 samples of a micro-batch may have."""

_Group = tuple[Sequence[int], Sequence[int]]
"""Axes before, and what they become."""


def permuted(region: Region, order: Sequence[int]) -> Region:
    """The region of a tensor whose axes are put in another order."""
    return Region(
        shape=tuple(region.shape[dim] for dim in order), ranges=tuple(region.ranges[dim] for dim in order),
        term=region.term,
    )  # fmt: skip


def viewed(region: Region, shape: Sequence[int]) -> Region | None:
    """The region of a local tensor after `view(shape)`; None where it is no product of ranges any more."""
    whole: list[int] = []
    ranges: list[Ranges] = []
    for before, after in _groups(region.local_shape, shape):
        found = _one_group(region, before, [shape[dim] for dim in after])
        if found is None:
            return None
        whole += found[0]
        ranges += found[1]
    return Region(shape=tuple(whole), ranges=tuple(ranges), term=region.term)


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[_Group]:
    """The fewest axes that become the fewest axes of as many elements, from left to right."""
    at_before, at_after = 0, 0
    while at_before < len(before) or at_after < len(after):
        first = [at_before] if at_before < len(before) else []
        second = [at_after] if at_after < len(after) else []
        while (held := prod(before[i] for i in first)) != (becomes := prod(after[i] for i in second)):
            grown, begins, length = (
                (first, at_before, len(before)) if held < becomes else (second, at_after, len(after))
            )
            if begins + len(grown) >= length:
                break
            grown.append(begins + len(grown))
        yield first, second
        at_before, at_after = at_before + len(first), at_after + len(second)


def _one_group(region: Region, before: Sequence[int], after: Sequence[int]) -> tuple[list[int], list[Ranges]] | None:
    shape, ranges = [region.shape[dim] for dim in before], [region.ranges[dim] for dim in before]
    if all(one == ((0, length),) for one, length in zip(ranges, shape, strict=True)):
        return list(after), [((0, length),) for length in after]
    if len(before) == 1 and after and (first := _split(shape[0], ranges[0], prod(after[1:]))) is not None:
        return [first[0], *after[1:]], [first[1], *(((0, length),) for length in after[1:])]
    if len(after) == 1 and (merged := _merged(shape, ranges)) is not None:
        return [prod(shape)], [merged]
    return None


def _split(length: int, ranges: Ranges, inner: int) -> tuple[int, Ranges] | None:
    """An axis of which blocks of `inner` become an axis of their own."""
    if not inner or any(number % inner for number in (length, *sum(ranges, ()))):
        return None
    return length // inner, tuple((first // inner, count // inner) for first, count in ranges)


def _merged(shape: Sequence[int], ranges: Sequence[Ranges]) -> Ranges | None:
    """Several axes as one."""
    cut = [dim for dim, one in enumerate(ranges) if one != ((0, shape[dim]),)]
    inner = prod(shape[cut[-1] + 1 :])
    outer = [[index for first, count in one for index in range(first, first + count)] for one in ranges[: cut[-1]]]
    if prod(map(len, outer)) * len(ranges[cut[-1]]) > MOST_RANGES:
        return None
    found: list[tuple[int, int]] = []
    for indices in product(*outer):
        start = 0
        for index, length in zip(indices, shape, strict=False):
            start = start * length + index
        start *= shape[cut[-1]]
        found += [((start + first) * inner, count * inner) for first, count in ranges[cut[-1]]]
    return tuple(found)
