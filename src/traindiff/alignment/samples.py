"""Which samples two batches have in common, whatever order they come in and whichever ranks have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from traindiff.findings.sentences import ranks_text
from traindiff.merging.samples import Sample

_MOST = 8
"""Samples or ranks that are named one by one."""


def says_of_samples(baseline: Sequence[Sample], candidate: Sequence[Sample]) -> str:
    """How the samples of two batches that differ match, in words that follow "input[0]"; empty where none is known."""
    if not baseline or not candidate:
        return ""
    held = [Counter(one.fingerprint for one in samples) for samples in (baseline, candidate)]
    if held[0] == held[1]:
        return f"holds the same samples in another order: {_order(baseline, candidate)}."
    missing, further = held[0] - held[1], held[1] - held[0]
    parts = []
    if repeated := [number for number, times in held[1].items() if times > held[0][number] > 0]:
        who = next(one for one in candidate if one.fingerprint == repeated[0])
        parts.append(f"one sample comes {held[1][repeated[0]]} times, first at {_where(who)}")
    if fresh := [one for one in candidate if one.fingerprint in further and not held[0][one.fingerprint]]:
        parts.append(
            f"{len(fresh)} of its {len(candidate)} samples are none of the baseline's, first {_where(fresh[0])}"
        )
    elif missing:
        lost = next(one for one in baseline if one.fingerprint in missing)
        parts.append(f"{missing.total()} of the baseline's {len(baseline)} samples are missing, first {_where(lost)}")
    return f"holds other samples: {', and '.join(parts)}.{_only_on(baseline, candidate)}"


def _only_on(baseline: Sequence[Sample], candidate: Sequence[Sample]) -> str:
    """The ranks that have other samples in their places, where others have the baseline's."""
    if len(baseline) != len(candidate):
        return ""
    pairs = zip(baseline, candidate, strict=True)
    apart = {actual.rank for expected, actual in pairs if expected.fingerprint != actual.fingerprint}
    if not apart < {one.rank for one in candidate}:
        return ""
    return f" Only what {ranks_text(sorted(apart), capital=False)} holds differs."


def _order(baseline: Sequence[Sample], candidate: Sequence[Sample]) -> str:
    """Which of the baseline's samples the candidate has where."""
    places: dict[int, list[int]] = {}
    for number, one in enumerate(baseline):
        places.setdefault(one.fingerprint, []).append(number)
    by_rank: dict[int, list[int]] = {}
    for one in candidate:
        by_rank.setdefault(one.rank, []).append(places[one.fingerprint].pop(0))
    size = len(by_rank)
    if size == 1:
        return f"the baseline's {_numbers(next(iter(by_rank.values())))}"
    held = [numbers for _, numbers in sorted(by_rank.items())]
    ranks = [f"{ranks_text([rank], capital=False)} has {_numbers(by_rank[rank])}" for rank in sorted(by_rank)]
    more = f", and {size - _MOST} more ranks" if size > _MOST else ""
    return f"of the baseline's, {', '.join(ranks[:_MOST])}{more}{_advice(held, len(baseline))}"


def _advice(held: Sequence[Sequence[int]], count: int) -> str:
    """Which setting of `record` brings samples that ranks share so into the baseline's order; empty where none does."""
    if all(list(numbers) == list(range(place, count, len(held))) for place, numbers in enumerate(held)):
        return ', in turn, as a distributed sampler gives them; record it with sample_order="interleaved"'
    if [number for numbers in held for number in numbers] == list(range(count)):
        return ', one block each; record it with sample_order="blocks"'
    return ""


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_MOST])) + (", ..." if len(numbers) > _MOST else "")


def _where(sample: Sample) -> str:
    return f"number {sample.place} of rank {sample.rank} in micro-step {sample.micro_step}"
