"""Inputs that count within a micro-batch, such as the graph of each node: they begin again in each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from traindiff.analyse.merge.recorded_calls import Sample
from traindiff.analyse.merge.site import MergedSite
from traindiff.core.summary import UNIT_ROUNDOFF

Cell = tuple[int, int]
"""A micro-step and a rank."""


def count_within(
    baseline: MergedSite, candidate: MergedSite, samples: tuple[Sequence[Sample], Sequence[Sample]]
) -> bool:
    """True if two runs number the same things in micro-batches of other sizes.

    Numbers that begin again in each micro-batch reach further in larger micro-batches. Where single rows are known,
    rows that share a micro-batch in both runs must have equal numbers in one run if they do in the other, and those of
    the first micro-batches must be equal, as both begin with the same rows. So a row with a wrong number is found.

    Args:
        baseline: The input in the baseline.
        candidate: The same in the candidate.
        samples: The rows of both; empty if they are not known.
    """
    if not may_count_within(baseline, candidate):
        return False
    return not all(samples) or (len(samples[0]) == len(samples[1]) and _is_renumbered(*samples))


def may_count_within(baseline: MergedSite, candidate: MergedSite) -> bool:
    """True if an input has one whole number per row, and the ranges of its numbers are those of such numbers."""
    both = (baseline, candidate)
    if any(one.dtype in UNIT_ROUNDOFF or one.dtype == "bool" or not one.batched or len(one.shape) != 1 for one in both):
        return False
    if not (baseline.parts and candidate.parts) or baseline.shape != candidate.shape:
        return False
    begins = {float(part.summary["minimum"]) for one in both for part in one.parts}
    rows = [max(part.shard.shape[0] for part in one.parts) for one in both]
    ends = [max(float(part.summary["maximum"]) for part in one.parts) for one in both]
    return len(begins) == 1 and (rows[0] - rows[1]) * (ends[0] - ends[1]) > 0


def _is_renumbered(baseline: Sequence[Sample], candidate: Sequence[Sample]) -> bool:
    names: dict[tuple[Cell, Cell], tuple[dict[int, int], dict[int, int]]] = {}
    for one, other in zip(baseline, candidate, strict=True):
        cells = (one.micro_step, one.rank), (other.micro_step, other.rank)
        there, back = names.setdefault(cells, ({}, {}))
        if there.setdefault(one.fingerprint, other.fingerprint) != other.fingerprint:
            return False
        if back.setdefault(other.fingerprint, one.fingerprint) != one.fingerprint:
            return False
    first = next(iter(names.values()))[0]
    return all(one == other for one, other in first.items())
