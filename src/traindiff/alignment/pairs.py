"""Bring the entries of two runs together, and say which have no counterpart."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from traindiff.merging.distance import Pair
from traindiff.merging.step_table import Entry, Key, num_micro_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """Two tables brought together.

    Attributes:
        pairs: In the baseline's execution order.
        only_baseline: Entries without a counterpart in the candidate.
        only_candidate: Entries without a counterpart in the baseline.
        unmerged: Pairs whose shapes show that a batch axis was not recognised on one side.
    """

    pairs: tuple[Pair, ...]
    only_baseline: tuple[Entry, ...]
    only_candidate: tuple[Entry, ...]
    unmerged: tuple[Pair, ...]


def align(baseline: Mapping[Key, Entry], candidate: Mapping[Key, Entry]) -> Aligned:
    """Pair entries by key; the candidate's paths are renamed already."""
    renamed = dict(candidate)
    pairs, unmerged, only_baseline = [], [], []
    split_alike = num_micro_steps(baseline) == num_micro_steps(candidate)
    for key, entry in baseline.items():
        other = renamed.pop(key, None)
        if other is None:
            only_baseline.append(entry)
        elif _is_unmerged(entry, other, split_alike=split_alike):
            unmerged.append(Pair(baseline=entry, candidate=other))
        else:
            pairs.append(Pair(baseline=entry, candidate=other))
    return Aligned(
        pairs=tuple(pairs),
        only_baseline=tuple(entry for entry in only_baseline if not _is_later_micro_step(entry, candidate)),
        only_candidate=tuple(e for e in renamed.values() if not _is_later_micro_step(e, baseline)),
        unmerged=tuple(unmerged),
    )


def in_baseline_order(pairs: Iterable[Pair]) -> Callable[[int], int]:
    """Map places in the candidate's execution order to the baseline's: behind the last pair before them."""
    # Random state is read when a forward pass ends: of a pipeline, when each of its stages does.
    flowing = (pair for pair in pairs if pair.baseline.key.path != "rng")
    places = sorted((pair.candidate.order, pair.baseline.order) for pair in flowing)
    ours = [candidate for candidate, _ in places]

    def place(order: int) -> int:
        before = bisect_left(ours, order)
        return places[before - 1][1] + 1 if before else 0

    return place


def _is_unmerged(baseline: Entry, candidate: Entry, *, split_alike: bool) -> bool:
    """Shapes that a batch axis explains which was not recognised on one side.

    Either the shapes agree except in axis 0, where one is a whole multiple of the other, or the runs split
    their batches into different numbers of micro-batches, and the shapes differ in one axis.
    """
    shapes = baseline.shape, candidate.shape
    if baseline.unobserved or candidate.unobserved:
        return False
    if (
        shapes[0] == shapes[1]
        or len(shapes[0]) != len(shapes[1])
        or baseline.key.phase not in ("batch", "forward", "backward")
    ):
        return False
    axes = [axis for axis, lengths in enumerate(zip(*shapes, strict=True)) if lengths[0] != lengths[1]]
    if not split_alike:
        return len(axes) <= 1 or any(one.parts and len(one.parts) > 1 for one in (baseline, candidate))
    small, large = sorted((shapes[0][0], shapes[1][0]))
    return axes == [0] and small > 0 and large % small == 0


def _is_later_micro_step(entry: Entry, others: Mapping[Key, Entry]) -> bool:
    """A tensor that one run has once per micro-step, and the other, with fewer, not so often."""
    return entry.key.micro_step > 0 and any(
        key.path == entry.key.path and key.phase == entry.key.phase for key in others
    )
