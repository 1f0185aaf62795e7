"""The operators of a module in two runs, brought together in the order in which they ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from traindiff.analyse.merge.operators import OperatorRun


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPair:
    """An operator in both runs, or in one of them only.

    Attributes:
        baseline: The baseline's; None where only the candidate has it.
        candidate: The candidate's; None where only the baseline has it.
    """

    baseline: OperatorRun | None
    candidate: OperatorRun | None


CallKey = tuple[int, int, str, str, int]
"""Rank, micro-step, phase, module, call: what has a sequence of operators."""


def by_call(runs: Sequence[OperatorRun]) -> dict[CallKey, list[OperatorRun]]:
    """Operators by the call of the module inside which they ran, in execution order."""
    found: dict[CallKey, list[OperatorRun]] = {}
    for one in runs:
        found.setdefault((one.rank, one.micro_step, one.phase, one.module, one.call), []).append(one)
    return found


def paired_calls(
    baseline: Mapping[CallKey, Sequence[OperatorRun]], candidate: Mapping[CallKey, Sequence[OperatorRun]]
) -> list[OperatorPair]:
    """The operators of several calls, in the baseline's execution order.

    The operators of a call are aligned by their names: the longest sequences that both runs have in common. So an
    operator that one run has more does not shift those behind it.
    """
    placed: list[tuple[tuple[int, int], OperatorPair]] = []
    for key in dict.fromkeys((*baseline, *candidate)):
        place = 0
        for number, pair in enumerate(paired(baseline.get(key, ()), candidate.get(key, ()))):
            if pair.baseline is not None:
                place = pair.baseline.order
            placed.append(((place, number), pair))
    return [pair for _, pair in sorted(placed, key=lambda one: one[0])]


def paired(baseline: Sequence[OperatorRun], candidate: Sequence[OperatorRun]) -> Iterator[OperatorPair]:
    """The operators of one call in both runs."""
    place = other_place = 0
    for first, other_first, length in _common([one.name for one in baseline], [one.name for one in candidate]):
        yield from (OperatorPair(baseline=one, candidate=None) for one in baseline[place:first])
        yield from (OperatorPair(baseline=None, candidate=one) for one in candidate[other_place:other_first])
        place, other_place = first + length, other_first + length
        both = zip(baseline[first:place], candidate[other_first:other_place], strict=True)
        yield from (OperatorPair(baseline=one, candidate=other) for one, other in both)


_LOOKED_THROUGH = 250_000
"""Pairs of operators up to which the longest sequences in common are searched for: a moment. The time grows faster."""

_AHEAD, _IN_A_ROW = 32, 2
"""In longer calls: how many operators may be left out at a time, and how many must then be the same again."""


def _common(names: Sequence[str], others: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Where the same names stand in both, in order, as `(place, other place, length)`; the last has no length.

    What both begin and end with is found first. So what one has more somewhere in a loop shifts none of its other
    turns, although any turn reads like any other.
    """
    shorter = min(len(names), len(others))
    head = _same(names, others, 0, 0)
    tail = 0
    while tail < shorter - head and names[-1 - tail] == others[-1 - tail]:
        tail += 1
    inner, other_inner = names[head : len(names) - tail], others[head : len(others) - tail]
    yield 0, 0, head
    if len(inner) * len(other_inner) <= _LOOKED_THROUGH:
        blocks: Iterable[tuple[int, int, int]] = SequenceMatcher(
            a=inner, b=other_inner, autojunk=False
        ).get_matching_blocks()
    else:
        blocks = _step_by_step(inner, other_inner)
    yield from ((head + place, head + other, length) for place, other, length in blocks if length)
    yield len(names) - tail, len(others) - tail, tail
    yield len(names), len(others), 0


def _step_by_step(names: Sequence[str], others: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """The same in a time that grows with the length alone: from each difference on to the nearest place that agrees."""
    place = other = 0
    while place < len(names) and other < len(others):
        if length := _same(names, others, place, other):
            yield place, other, length
            place, other = place + length, other + length
        else:
            skipped, other_skipped = next(_agreeing(names, others, place, other), (1, 1))
            place, other = place + skipped, other + other_skipped


def _agreeing(names: Sequence[str], others: Sequence[str], place: int, other: int) -> Iterator[tuple[int, int]]:
    """How many to leave out of each so that the next ones are the same, fewest first."""
    for both in range(1, _AHEAD + 1):
        for skipped in range(both + 1):
            one, two = place + skipped, other + both - skipped
            wanted = list(names[one : one + _IN_A_ROW])
            if wanted and wanted == list(others[two : two + _IN_A_ROW]):
                yield skipped, both - skipped


def _same(names: Sequence[str], others: Sequence[str], place: int, other: int) -> int:
    """How many names are the same from there on."""
    length = 0
    while (
        place + length < len(names) and other + length < len(others) and names[place + length] == others[other + length]
    ):
        length += 1
    return length
