"""Whether what ranks hold of a tensor makes a whole, or why that is not known."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import prod
from typing import Any

from traindiff.observation import Observation
from traindiff.shards import Shard
from traindiff.site import ROOT

_MOST_RUNS = 1 << 20
"""Runs of rows that lie one after the other, of all ranks, that are looked at. Of a shard whose rows are spaced each
sample of a batch may be one."""


def gap(shape: Sequence[int], shards: Collection[Shard]) -> str:
    """Why the shards of a tensor of a shape do not make a whole; empty where they do."""
    shapes = {shard.global_shape[1:] if shard.batched else shard.global_shape for shard in shards}
    if len(shapes) > 1:
        one, other, *_ = sorted(shapes)
        return f"ranks disagree on the shape of the whole: {list(one)} or {list(other)}"
    batched = any(shard.batched for shard in shards)
    return (_misplaced_rows(shards) if batched else "") or _uncovered(shape, shards)


def not_placed(parts: Sequence[tuple[Observation, int, Any]]) -> str:
    """Why it is not known what ranks hold of an activation or a loss, if they hold different values of one shard.

    Args:
        parts: Observation, rank and summary of each.
    """
    if len(parts) == 1:
        return ""
    first = parts[0][0]
    summed = first.merge == "sum"
    values: dict[tuple[int, int], set[int]] = {}
    for seen, _, summary in parts:
        values.setdefault((seen.micro_step, seen.term if summed else 0), set()).add(int(summary["fingerprint"]))
    are_copies = not summed and len({seen.term for seen, _, _ in parts}) == 1
    if are_copies or all(len(same) == 1 for same in values.values()):
        return ""
    if first.phase == "loss":
        return "ranks that work on the same samples hold different values of it"
    return (
        "ranks hold different values of it, and which part of the whole these are is not known: declare its "
        f'batch axis with record(batch_axis={{"{first.path or ROOT}": ...}}) or, where ranks divide the model, which '
        f'part each has with record(shards=[traindiff.shard("{first.path or ROOT}", dim=..., axis=...)])'
    )


def _misplaced_rows(shards: Iterable[Shard]) -> str:
    """Why the rows of ranks and micro-batches do not make a batch; empty where they do."""
    shards = [shard for shard in shards if shard.batched]  # ranks may disagree
    if sum(shard.shape[0] // shard.spacing[0] for shard in shards if shard.spacing) > _MOST_RUNS:
        return f"its rows lie in more than {_MOST_RUNS:,} places"
    rows = sorted({run for shard in shards for run in _runs_of_rows(shard) if run[1]})
    ends = [0, *(first + count for first, count in rows)]
    for (first, _), end in zip(rows, ends, strict=False):
        if first != end:
            what = "overlap" if first < end else "leave gaps"
            return f"rows of several ranks {what}: their batches differ in size, so which sample is which is not known"
    return ""


def _runs_of_rows(shard: Shard) -> Iterable[tuple[int, int]]:
    """First row and number of rows that lie one after the other."""
    if shard.spacing is None:
        return [(shard.offset[0], shard.shape[0])]
    together, apart = shard.spacing
    return [(shard.offset[0] + number * apart, together) for number in range(shard.shape[0] // together)]


def _uncovered(shape: Sequence[int], shards: Iterable[Shard]) -> str:
    """Why the shards of a tensor do not make a whole; empty where they do."""
    whole, held = prod(shape), sum(shard.size for shard in shards)
    if held < whole:
        return f"its shards leave {whole - held:,} of its {whole:,} elements out"
    return f"its shards overlap in {held - whole:,} of its {whole:,} elements" if held > whole else ""
