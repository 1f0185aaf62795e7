"""On which ranks a difference is: by what each holds, where both runs are cut alike, or by rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from traindiff.analyse.merge.distance import Pair, difference
from traindiff.analyse.merge.step_table import Entry, Held
from traindiff.core.shards import BUCKETS, Shard

CLEAR = 0.05
"""A part differs where its difference is at least this share of the largest one's: the others are that much quieter."""


def differing_ranks(pair: Pair, floor: float) -> tuple[int, ...]:
    """Ranks of the candidate whose parts differ while those of others do not.

    Args:
        pair: A site at which the runs differ.
        floor: Relative difference up to which a part is taken as equal.

    Returns:
        Their numbers; empty where all differ, or where the recordings do not tell.
    """
    held = {part.rank for part in pair.candidate.parts}
    if len(held) < 2 or pair.baseline.unobserved or pair.candidate.unobserved:
        return ()
    if groups := pair.candidate.apart:  # copies that should be the same; the largest group comes first
        largest, *others = groups
        return () if len(others[0]) == len(largest) else tuple(sorted(rank for group in others for rank in group))
    found = _by_parts(pair, floor)
    if found is None:
        found = _by_rows(pair)
    return tuple(sorted(found)) if found and found < held else ()


def differences_by_rank(pair: Pair) -> dict[int, float]:
    """By rank of the candidate: the largest relative difference of its parts from their counterparts.

    Args:
        pair: A site that both runs have.

    Returns:
        inf for a difference without a size; empty where the runs do not hold the same parts.
    """
    sides = [_by_place(entry.parts) for entry in (pair.baseline, pair.candidate)]
    if sides[0].keys() != sides[1].keys() or len(sides[0]) < 2:
        return {}
    apart: dict[int, float] = {}
    for place, candidate in sides[1].items():
        one = Pair(baseline=_part(pair.baseline, sides[0][place]), candidate=_part(pair.candidate, candidate))
        size = difference(one)
        apart[candidate.rank] = max(apart.get(candidate.rank, 0.0), np.inf if size is None else size)
    return apart


def _by_parts(pair: Pair, floor: float) -> set[int] | None:
    """Where both runs hold the same parts, each part against its counterpart; None where they do not."""
    apart = differences_by_rank(pair)
    if not apart:
        return None
    limit = max(floor, CLEAR * max(apart.values())) if np.isfinite(max(apart.values())) else floor
    return {rank for rank, size in apart.items() if size > limit}


def _by_place(parts: Sequence[Held]) -> dict[tuple[Any, ...], Held]:
    """Parts by what distinguishes them: micro-step, elements, and which copy of these."""
    found: dict[tuple[Any, ...], Held] = {}
    copies: dict[tuple[Any, ...], int] = {}
    for part in parts:
        place = (part.micro_step, part.shard)
        number = copies[place] = copies.get(place, -1) + 1
        found[(*place, number)] = part
    return found


def _part(entry: Entry, part: Held) -> Entry:
    return replace(entry, summary=part.summary, shape=part.shard.shape, exact=entry.factor == 1.0)


def _by_rows(pair: Pair) -> set[int] | None:
    """The rank in whose rows all that differs lies; None where several may be, or the ranks are not cut so."""
    candidate = pair.candidate
    if candidate.batched or candidate.summed or not candidate.shape:
        return None
    axis = "row" if len(candidate.shape) > 1 else "column"
    expected, actual = (np.sqrt(entry.summary[f"{axis}_squares"]) for entry in (pair.baseline, candidate))
    change = np.abs(actual - expected)
    if not np.isfinite(change).all() or not change.any():
        return None
    differing = set(np.flatnonzero(change > CLEAR * change.max()).tolist())
    owners = {part.rank for part in candidate.parts if differing <= _buckets(part.shard)}
    return owners if len(owners) == 1 else None


def _buckets(shard: Shard) -> set[int]:
    """The buckets of the row profile, or of a vector's column profile, in which a part has elements."""
    grid = shard.grid
    if not shard.size:
        return set()
    length = shard.shape[0]
    if len(shard.offset) < len(shard.global_shape):  # a flat range
        first, last = shard.offset[0] // grid.columns, (shard.offset[0] + length - 1) // grid.columns
    else:
        first, last = shard.offset[0], shard.offset[0] + length - 1
    if len(shard.global_shape) == 1:
        return {column // grid.column_block for column in range(first, last + 1)}
    return {row // grid.row_block % BUCKETS for row in range(first, last + 1)}
