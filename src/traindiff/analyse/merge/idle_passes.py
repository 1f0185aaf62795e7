"""Passes of a step from which nothing follows: forward passes without a backward pass, and gradients cleared unread."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from traindiff.analyse.merge.site import Part, SiteKey
from traindiff.core.observation import CLEARED, ITSELF, PLACE, SAMPLE, Observation
from traindiff.core.shards import Shard
from traindiff.core.summary import number

_FLOWS = ("batch", "forward")
_TELLING = ("batch", "backward", "loss", "grad")
"""Phases that show passes."""

_AGAIN = "evaluation"
"""Stage of forward passes without gradients: they belong to no micro-step."""


class _Round(NamedTuple):
    """One micro-step of one evaluation of the loss."""

    evaluation: int
    micro_step: int


class _Call(NamedTuple):
    """One call of a root module."""

    at: _Round
    path: str
    call: int


@dataclass(slots=True)
class _Rank:
    """What one rank shows of its passes.

    Attributes:
        begins: Where the calls of the root modules begin: place in execution order, and call.
        flows: The calls through whose outputs a gradient flowed back.
        used: Micro-steps with a backward pass.
        cleared: The micro-steps until which gradients were cleared.
    """

    begins: list[tuple[int, _Call]] = field(default_factory=list)
    flows: set[_Call] = field(default_factory=set)
    used: set[_Round] = field(default_factory=set)
    cleared: list[_Round] = field(default_factory=list)

    def see(self, seen: Observation, summary: Any) -> None:
        """Note one observation."""
        phase, at = seen.phase, _Round(seen.evaluation, seen.micro_step)
        if phase == "batch" and not seen.stage and seen.path not in ("rng", ITSELF):
            self.begins.append((seen.order, _Call(at, seen.path, seen.call)))
        elif phase in ("backward", "loss") and not seen.unobserved:
            self.used.add(at)
            if phase == "backward" and not seen.stage:
                self.flows.add(_Call(at, seen.path, seen.call))
        elif phase == "grad" and seen.stage == CLEARED and not seen.unobserved:
            self.cleared.append(_Round(seen.evaluation, int(number(summary))))

    def is_cleared(self, at: _Round) -> bool:
        """True if the gradients of a micro-step were cleared."""
        return any(at.evaluation == one.evaluation and at.micro_step <= one.micro_step for one in self.cleared)

    def idle(self) -> set[_Call]:
        """The calls from which nothing follows; none if that would be all, or if nothing is known of gradients."""
        calls = {call for _, call in self.begins}
        flowing = {call.path for call in self.flows if call in calls and not self.is_cleared(call.at)}
        idle = {
            call
            for call in calls
            if self.is_cleared(call.at) or call.at not in self.used or (call.path in flowing and call not in self.flows)
        }
        return idle if self.used and idle < calls else set()


class Rest(NamedTuple):
    """A step without idle passes.

    Attributes:
        parts: What is left; empty if there was no such pass.
        moved: The sites whose rows have other places than when they were summarized.
    """

    parts: list[Part]
    moved: frozenset[SiteKey] = frozenset()


def without_idle(parts: Sequence[Part]) -> Rest:
    """The parts of a step without the passes from which nothing follows, as if these had not been run.

    Left out are calls of the model through which no gradient flows while some does through others (a look at the model,
    a batch that was skipped once its loss was seen), and micro-steps whose gradients were cleared before any step read
    them (a saliency map, a batch that was skipped once its gradients were seen). Micro-steps, calls and rows are
    numbered anew. What flows through a detached output is not known here: whether this is the better view of a step,
    two runs tell together.

    Returns:
        The rest; without parts if there is no such pass, or if a pipeline runs its stages at the same time.
    """
    ranks: dict[int, _Rank] = {}
    for seen, rank, summary in parts:
        if seen.phase in _FLOWS and seen.order >= PLACE:
            return Rest([])
        if seen.phase in _TELLING:  # of the thousands of observations of a step
            ranks.setdefault(rank, _Rank()).see(seen, summary)
    idle = {rank: one.idle() for rank, one in ranks.items()}
    if not any(idle.values()):
        return Rest([])
    for one in ranks.values():
        one.begins.sort()
    kept = [part for part in parts if part[1] not in ranks or not _is_idle(part[0], ranks[part[1]], idle[part[1]])]
    return _in_place(_renumbered(kept))


def _is_idle(seen: Observation, rank: _Rank, idle: Collection[_Call]) -> bool:
    if seen.stage == _AGAIN or seen.path == ITSELF:
        return False
    if seen.phase in _FLOWS:
        before = bisect_right(rank.begins, seen.order, key=lambda one: one[0])
        return before > 0 and rank.begins[before - 1][1] in idle
    if seen.phase == "grad" and seen.stage == CLEARED:
        return True
    follows = seen.phase in ("loss", "backward") or (seen.phase == "grad" and bool(seen.stage))
    return follows and rank.is_cleared(_Round(seen.evaluation, seen.micro_step))


def _renumbered(parts: Sequence[Part]) -> list[Part]:
    """The parts with micro-steps, calls and samples numbered from 0 without gaps."""
    rounds = _numbers((seen.evaluation, seen.micro_step) for seen, _, _ in parts if _is_pass(seen))
    calls = _numbers((_place(seen, rank), seen.call) for seen, rank, _ in parts if _is_pass(seen))
    found = []
    for seen, rank, summary in parts:
        place = _place(seen, rank)
        call = calls.get(place, {}).get(seen.call, seen.call)
        later = rounds.get(seen.evaluation, {})
        micro_step = later.get(seen.micro_step, max(later.values(), default=seen.micro_step))
        same = (call, micro_step) == (seen.call, seen.micro_step)
        found.append((seen if same else seen._replace(call=call, micro_step=micro_step), rank, summary))
    return found


def _is_pass(seen: Observation) -> bool:
    return seen.phase in _FLOWS and seen.stage != _AGAIN


def _place(seen: Observation, rank: int) -> tuple[object, ...]:
    """What numbers its calls by itself: a module in a micro-step of a rank, forward and backward; a batch's samples."""
    at = rank, seen.evaluation, seen.micro_step, seen.path
    if seen.phase == "backward":
        return (*at, "forward", "", "")
    return (*at, seen.phase, seen.stage, seen.slot if seen.stage == SAMPLE else "")


def _numbers(found: Iterable[tuple[object, int]]) -> Mapping[object, Mapping[int, int]]:
    """By place, the number that each number has among those that are there."""
    by_place: dict[object, set[int]] = {}
    for place, one in found:
        by_place.setdefault(place, set()).add(one)
    return {place: {one: count for count, one in enumerate(sorted(there))} for place, there in by_place.items()}


def _in_place(parts: Sequence[Part]) -> Rest:
    """The parts with the rows of each site brought together: each micro-step's behind those of the one before."""
    firsts: dict[tuple[int, SiteKey], dict[int, list[tuple[int, int]]]] = {}
    for seen, _, _ in parts:
        if _has_rows(seen):
            shard = seen.shard
            rows = shard.offset[0], shard.offset[0] + _extent(shard)
            firsts.setdefault(_site(seen), {}).setdefault(seen.micro_step, []).append(rows)
    moved: dict[tuple[int, SiteKey, int], int] = {}
    for site, by_micro_step in firsts.items():
        behind = 0
        for micro_step in sorted(by_micro_step):
            begin = min(first for first, _ in by_micro_step[micro_step])
            moved[*site, micro_step] = behind - begin
            behind += max(end for _, end in by_micro_step[micro_step]) - begin
    found = [
        (_moved(seen, moved[*_site(seen), seen.micro_step]) if _has_rows(seen) else seen, rank, summary)
        for seen, rank, summary in parts
    ]
    return Rest(found, frozenset(site for (_, site, _), by in moved.items() if by))


def _has_rows(seen: Observation) -> bool:
    return seen.shard.batched and not seen.unobserved and seen.stage not in (SAMPLE, _AGAIN)


def _site(seen: Observation) -> tuple[int, SiteKey]:
    return seen.evaluation, SiteKey(seen.phase, seen.stage, seen.path, seen.slot, seen.call)


def _extent(shard: Shard) -> int:
    """Rows from the first to behind the last, with the gaps between them."""
    if shard.spacing is None:
        return shard.shape[0]
    together, apart = shard.spacing
    return (shard.shape[0] // together - 1) * apart + together


def _moved(seen: Observation, by: int) -> Observation:
    if not by:
        return seen
    offset = (seen.shard.offset[0] + by, *seen.shard.offset[1:])
    return seen._replace(shard=replace(seen.shard, offset=offset))
