"""The operators of a step in two runs, brought together in the order in which they ran."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.site import MergedSite, Part, SiteKey
from traindiff.core.observation import OPERATOR, Observation
from traindiff.core.site import ROOT

_PATH = re.compile(r"(.*)/([^/]+)\[(\d+)\]")

RunKey = tuple[int, int, str, str, int]
"""Rank, micro-step, phase, path and call of an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRun:
    """One operator, run once.

    Attributes:
        rank: Rank.
        micro_step: Micro-step.
        phase: `forward` or `backward`.
        path: As it was recorded, e.g. `encoder.fc/aten.addmm[0]`.
        module: Canonical path of the module inside which it ran, under the baseline's names.
        call: Which call of that module in the micro-step.
        name: Without its number, e.g. `aten.addmm`.
        order: Place of its first observation in execution order.
        inputs: Its inputs, by slot.
        outputs: Tensors that it returned or wrote to, by slot.
    """

    rank: int
    micro_step: int
    phase: str
    path: str
    module: str
    call: int
    name: str
    order: int
    inputs: Mapping[str, MergedSite]
    outputs: Mapping[str, MergedSite]

    @property
    def key(self) -> RunKey:
        """The same in every run of the same code."""
        return self.rank, self.micro_step, self.phase, self.path, self.call


def operator_runs(parts: Iterable[Part], rename: Rename = str) -> list[OperatorRun]:
    """The operators in execution order, without those that activation checkpointing ran a second time."""
    by_run: dict[RunKey, list[tuple[Observation, Any]]] = {}
    for seen, rank, summary in parts:
        if seen.stage == OPERATOR:
            by_run.setdefault((rank, seen.micro_step, seen.phase, seen.path, seen.call), []).append((seen, summary))
    found = [_operator_run(rank, observed, rename) for (rank, *_), observed in by_run.items()]
    return sorted((one for one in found if one is not None), key=lambda one: (one.rank, one.order))


def _operator_run(rank: int, observed: list[tuple[Observation, Any]], rename: Rename) -> OperatorRun | None:
    first = observed[0][0]
    match = _PATH.fullmatch(first.path)
    if match is None:
        return None
    entries = {seen.slot: _entry(seen, summary) for seen, summary in observed}
    return OperatorRun(
        rank=rank,
        micro_step=first.micro_step,
        phase=first.phase,
        path=first.path,
        module=rename("" if match[1] == ROOT else match[1]),
        call=first.call,
        name=match[2],
        order=min(seen.order for seen, _ in observed),
        inputs={slot: entry for slot, entry in entries.items() if slot.startswith("input")},
        outputs={slot: entry for slot, entry in entries.items() if slot.startswith("output")},
    )


def _entry(seen: Observation, summary: Any) -> MergedSite:
    """The tensor of one rank: operators are not merged."""
    return MergedSite(
        key=SiteKey(seen.phase, seen.stage, seen.path, seen.slot, seen.call, seen.micro_step),
        order=seen.order, dtype=seen.dtype, shape=seen.shard.shape, summary=summary, unobserved=seen.unobserved,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPair:
    """An operator in both runs, or in one of them only: then the other one is None."""

    baseline: OperatorRun | None
    candidate: OperatorRun | None


CallKey = tuple[int, int, str, str, int]
"""Rank, micro-step, phase, module and call: the key of a sequence of operators."""


def by_call(runs: Iterable[OperatorRun]) -> dict[CallKey, list[OperatorRun]]:
    """Operators by the module call that they ran in, in execution order."""
    found: dict[CallKey, list[OperatorRun]] = {}
    for one in runs:
        found.setdefault((one.rank, one.micro_step, one.phase, one.module, one.call), []).append(one)
    return found


def paired_calls(
    baseline: Mapping[CallKey, Sequence[OperatorRun]], candidate: Mapping[CallKey, Sequence[OperatorRun]]
) -> list[OperatorPair]:
    """The operators of several calls, in the baseline's execution order.

    The operators of a call are aligned by their names: the longest sequences that both runs have in common. So one
    additional operator does not shift those after it.
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
"""Largest number of operator pairs to search for the longest common sequences, because time grows faster."""

_AHEAD, _IN_A_ROW = 32, 2
"""In longer calls: how many operators may be skipped at a time, and how many must then agree."""


def _common(names: Sequence[str], others: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Blocks of equal names in both, in order, as `(place, other place, length)`; the last has no length.

    Common beginnings and ends are found first. So one additional operator in a loop does not shift the other
    iterations, although all of them look alike.
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
    """The same in linear time: after each difference, go on at the nearest place that agrees."""
    place = other = 0
    while place < len(names) and other < len(others):
        if length := _same(names, others, place, other):
            yield place, other, length
            place, other = place + length, other + length
        else:
            skipped, other_skipped = next(_agreeing(names, others, place, other), (1, 1))
            place, other = place + skipped, other + other_skipped


def _agreeing(names: Sequence[str], others: Sequence[str], place: int, other: int) -> Iterator[tuple[int, int]]:
    """How many names to skip in each so that the next ones agree, fewest first."""
    for both in range(1, _AHEAD + 1):
        for skipped in range(both + 1):
            one, two = place + skipped, other + both - skipped
            wanted = list(names[one : one + _IN_A_ROW])
            if wanted and wanted == list(others[two : two + _IN_A_ROW]):
                yield skipped, both - skipped


def _same(names: Sequence[str], others: Sequence[str], place: int, other: int) -> int:
    """Number of equal names from there on."""
    length = 0
    while (
        place + length < len(names) and other + length < len(others) and names[place + length] == others[other + length]
    ):
        length += 1
    return length
