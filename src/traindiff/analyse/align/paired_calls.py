"""Calls of a model that one run calls more often: which of them the other run has, by what the model is given."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from traindiff.analyse.align.side import Tables
from traindiff.analyse.merge.distance import Pair, difference, equal_bits
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.core.observation import BEFORE, ITSELF, SAMPLE
from traindiff.core.site import enclosing

_RNG = "rng"

_SAME = 0.1
"""Inputs that differ by less are the same, as rounding or a fault left them; other samples differ by about 1."""

_MOST = 4096
"""Pairs of calls that are held against each other at most."""

_AGREE = 1e-4
"""Losses that agree so well belong to the same samples, although the runs show different ones of their calls."""

_Call = tuple[str, int]
"""A root and the number of one of its calls."""

_Inputs = Mapping[int, Mapping[SiteKey, MergedSite]]
"""What a root is given, by call. Keys have no call."""


def with_paired_calls(tables: Tables) -> Tables:
    """The tables of a step; of a root that one run calls more often, equal calls have equal numbers.

    A training may compute one pass by the model, and another one by hand or with `functional_call` of its parts, and
    the other run the other way around. Then calls with one number have nothing in common. What a root is given tells
    which calls belong together, and among equal inputs what it returns. A call without a counterpart gets a number that
    the other run does not have. Nothing is changed if the run with fewer calls is given anything else, unless the
    losses agree: then each run shows other passes of the same training.
    """
    inputs = _inputs(tables[0]), _inputs(tables[1])
    numbers: tuple[dict[_Call, int], dict[_Call, int]] = {}, {}
    for root in [root for root in inputs[0] if root in inputs[1]]:
        own, other = inputs[0][root], inputs[1][root]
        if len(own) == len(other) or len(own) * len(other) > _MOST:
            continue
        found = _matches(_costs((own, other), [_outputs(table, root) for table in tables]))
        if len(found) < min(len(own), len(other)) and not _losses_agree(tables):
            continue
        fewer = 0 if len(own) < len(other) else 1
        calls, others = sorted(inputs[fewer][root]), sorted(inputs[1 - fewer][root])
        there = dict(found) if fewer == 0 else {candidate: baseline for baseline, candidate in found}
        fresh = iter(range(max(others) + 1, max(others) + 1 + len(calls)))
        for number, call in enumerate(calls):
            numbers[fewer][root, call] = others[there[number]] if number in there else next(fresh)
    baseline, candidate = (
        _renumbered(own, other, changed) if any(call != new for (_, call), new in changed.items()) else own
        for own, other, changed in zip(tables, tables[::-1], numbers, strict=True)
    )
    return baseline, candidate


def _inputs(table: StepTable) -> dict[str, dict[int, dict[SiteKey, MergedSite]]]:
    found: dict[str, dict[int, dict[SiteKey, MergedSite]]] = {}
    for key, entry in table.items():
        if key[:2] == ("batch", "") and key.path not in (_RNG, ITSELF):
            found.setdefault(key.path, {}).setdefault(key.call, {})[key._replace(call=0)] = entry
    return found


def _outputs(table: StepTable, root: str) -> Mapping[int, MergedSite]:
    """The first tensor that each call of a root returns."""
    found: dict[int, MergedSite] = {}
    for key, entry in table.items():
        if key[:3] == ("forward", "", root):
            found.setdefault(key.call, entry)
    return found


def _costs(sides: tuple[_Inputs, _Inputs], outputs: Sequence[Mapping[int, MergedSite]]) -> list[list[float]]:
    """How little the calls of two runs have in common: inf if they are given different inputs."""
    costs = []
    for call, own in sorted(sides[0].items()):
        row = []
        for number, other in sorted(sides[1].items()):
            apart = (
                max((_apart(one, other[key]) for key, one in own.items()), default=0.0)
                if own.keys() == other.keys()
                else math.inf
            )
            returned = outputs[0].get(call), outputs[1].get(number)
            if returned[0] is not None and returned[1] is not None:
                apart += 1e-3 * min(1.0, _apart(returned[0], returned[1]))
            row.append(apart if apart <= _SAME else math.inf)
        costs.append(row)
    return costs


def _apart(baseline: MergedSite, candidate: MergedSite) -> float:
    if baseline.unobserved or candidate.unobserved or baseline.shape != candidate.shape:
        return math.inf
    pair = Pair(baseline=baseline, candidate=candidate)
    size = 0.0 if equal_bits(pair) else difference(pair)
    return math.inf if size is None else size


def _matches(costs: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """The most matches that keep the order of both runs, and of these the ones that cost least."""
    width = len(costs[0])
    best = [[(0, 0.0)] * (width + 1) for _ in range(len(costs) + 1)]  # number of matches, and minus what they cost
    for row in range(len(costs) - 1, -1, -1):
        for column in range(width - 1, -1, -1):
            found = max(best[row + 1][column], best[row][column + 1])
            if math.isfinite(cost := costs[row][column]):
                count, saved = best[row + 1][column + 1]
                found = max(found, (count + 1, saved - cost))
            best[row][column] = found
    return list(_way(costs, best))


def _way(costs: Sequence[Sequence[float]], best: Sequence[Sequence[tuple[int, float]]]) -> Iterator[tuple[int, int]]:
    row = column = 0
    while row < len(costs) and column < len(costs[0]):
        count, saved = best[row + 1][column + 1]
        if math.isfinite(costs[row][column]) and best[row][column] == (count + 1, saved - costs[row][column]):
            yield row, column
            row, column = row + 1, column + 1
        elif best[row][column] == best[row + 1][column]:
            row += 1
        else:
            column += 1


def _losses_agree(tables: Tables) -> bool:
    losses = [(one, tables[1].get(key)) for key, one in tables[0].items() if key[:2] == ("loss", "")]
    return bool(losses) and all(other is not None and _apart(one, other) <= _AGREE for one, other in losses)


class _Places:
    """Knows in which call of a root a site is, by the order of execution."""

    def __init__(self, table: StepTable) -> None:
        begins: dict[_Call, int] = {}
        for root, calls in _inputs(table).items():
            for call, inputs in calls.items():
                begins[root, call] = min(entry.order for entry in inputs.values())
        ordered = sorted((order, call) for call, order in begins.items())
        self._begins = {root: [one for one in ordered if one[1][0] == root] for root, _ in begins}
        self._begins[_RNG] = ordered
        self._calls = _calls(table)

    def within(self, path: str) -> dict[_Call, list[int]]:
        """The calls of a module, in order, by the call of the root around it."""
        begins = self._begins.get(_RNG if path == _RNG else _root(path, self._begins), [])
        orders, found = [order for order, _ in begins], dict[_Call, list[int]]()
        for call, order in sorted(self._calls.get(path, {}).items()):
            if number := bisect_right(orders, order):
                found.setdefault(begins[number - 1][1], []).append(call)
        return found

    @property
    def paths(self) -> Collection[str]:
        """Paths of all modules that are called."""
        return self._calls.keys()


def _root(path: str, roots: Collection[str]) -> str:
    return next((root for root in enclosing(path) if root in roots), "")


def _calls(table: StepTable) -> dict[str, dict[int, int]]:
    """Place of each call of each module in the order of execution."""
    found: dict[str, dict[int, int]] = {}
    for key, entry in table.items():
        if key[:2] in (("forward", ""), ("batch", "")) or (key.path == _RNG and key.stage == BEFORE):
            calls = found.setdefault(key.path, {})
            calls[key.call] = min(entry.order, calls.get(key.call, entry.order))
    return found


def _renumbered(table: StepTable, other: StepTable, numbers: Mapping[_Call, int]) -> dict[SiteKey, MergedSite]:
    """The table with the other run's numbers of the calls of roots, and of the calls of modules within these."""
    own, there = _Places(table), _Places(other)
    new: dict[tuple[str, int], int] = {}
    for path in own.paths:
        known = there.within(path)
        fresh = 1 + max((call for calls in known.values() for call in calls), default=-1)
        for (root, call), calls in own.within(path).items():
            counterparts = known.get((root, numbers.get((root, call), call)), [])
            for number, held in enumerate(calls):
                if number < len(counterparts):
                    new[path, held] = counterparts[number]
                else:
                    new[path, held], fresh = fresh, fresh + 1
    found = {}
    for key, entry in table.items():
        flows = key.phase in ("batch", "forward", "backward") and key.stage not in (SAMPLE, "evaluation")
        call = new.get((key.path, key.call), key.call) if flows else key.call
        changed = key._replace(call=call)
        found[changed] = entry if call == key.call else replace(entry, key=changed)
    return found
