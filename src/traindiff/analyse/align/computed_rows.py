"""Modules that the runs compute for other rows: experts for all or for chosen ones, sets that are padded or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from traindiff.analyse.align.side import Tables
from traindiff.analyse.merge.distance import Pair, difference
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.core.summary import UNIT_ROUNDOFF

_APART = 1e-3
"""Relative difference below which what is computed from other rows agrees; 16 roundings in a short dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedRows:
    """A step without the sites of which one run computes all rows.

    Attributes:
        tables: Both tables.
        without: The baseline's entries of those sites.
        padded: Paths of those modules that are no matter of chosen rows.
    """

    tables: Tables
    without: tuple[MergedSite, ...] = ()
    padded: Collection[str] = ()


def without_other_rows(tables: Tables, known: Collection[str] = ()) -> ComputedRows:
    """Leave out activations that the runs compute for other rows, if what follows from them agrees.

    A run may compute each expert for the rows that a router gives it, or for all rows and multiply the others by 0.
    It may call a module on sets of different lengths one by one, or once on all of them, padded to one length.
    What follows is the same, and so are all gradients of parameters. So this is only done if what the model returns
    has the same shape in both runs: if rows are lost for good, the first site without them is named. Where it is not a
    matter of chosen rows, the next activation, or what the model returns, must agree, too: otherwise the other shape
    is the fault. Calls that have as many rows together in both runs are only divided otherwise (see `regrouped`).

    Args:
        tables: Both tables.
        known: Paths of modules that were left out in an earlier step.
    """
    baseline, candidate = tables
    shaped = [
        key
        for key, entry in baseline.items()
        if key in candidate
        and _flows(key)
        and entry.shape != candidate[key].shape
        and _have_same_features(entry, candidate[key])
    ]
    if not shaped:
        return ComputedRows(tables=tables)
    counts = _elements(baseline), _elements(candidate)
    apart = [key for key in shaped if counts[0][key.of_calls] != counts[1][key.of_calls]]
    if not apart or _last_shapes(baseline) != _last_shapes(candidate):
        return ComputedRows(tables=tables)
    found = [key for key in apart if _are_chosen(baseline[key], candidate[key])]
    calls = _calls(baseline), _calls(candidate)
    arranged = [key for key in apart if _are_arranged(key, tables) or calls[0][key.of_calls] != calls[1][key.of_calls]]
    others = _modules(arranged) - _modules(found)
    padded = others if others and (others <= set(known) or _what_follows_agrees(tables, others)) else set()
    found = [*found, *(key for key in apart if key.path in padded)]
    if not found:
        return ComputedRows(tables=tables)
    places = {_place(key) for key in found}
    one, other = (
        {
            key: entry
            for key, entry in table.items()
            if not (_flows(key) and (_place(key) in places or key.path in padded))
        }
        for table in tables
    )
    return ComputedRows(tables=(one, other), without=tuple(baseline[key] for key in found), padded=padded)


def _flows(key: SiteKey) -> bool:
    return key.phase in ("forward", "backward") and not key.stage


def _elements(table: StepTable) -> Counter[SiteKey]:
    """Elements of all calls of a step, by site."""
    found: Counter[SiteKey] = Counter()
    for key, entry in table.items():
        if _flows(key) and not entry.unobserved:
            found[key.of_calls] += int(entry.summary["count"])
    return found


def _place(key: SiteKey) -> SiteKey:
    """The call of a module."""
    return key._replace(phase="", slot="")


def _modules(keys: Collection[SiteKey]) -> set[str]:
    return {key.path for key in keys}


def _calls(table: StepTable) -> Counter[SiteKey]:
    """Calls of a step, by site."""
    return Counter(key.of_calls for key in table if _flows(key))


def _are_arranged(key: SiteKey, tables: Tables) -> bool:
    """True if the rows of an activation are in tensors of another number of axes."""
    baseline, candidate = (len(table[key].shape) for table in tables)
    return baseline != candidate


def _have_same_features(baseline: MergedSite, candidate: MergedSite) -> bool:
    """True if two activations are of the same kind: the last axis is as long, or that of channels."""
    one, other = baseline.shape, candidate.shape
    if baseline.unobserved or candidate.unobserved or not one or not other:
        return False
    return one[-1] == other[-1] or (len(one) > 2 and len(other) > 2 and one[1] == other[1])


def _are_chosen(baseline: MergedSite, candidate: MergedSite) -> bool:
    """True if one run computes all rows of an activation, and the other rows that were chosen."""
    return (
        baseline.batched != candidate.batched
        and len(baseline.shape) == len(candidate.shape)
        and baseline.shape[0] != candidate.shape[0]
        and baseline.shape[1:] == candidate.shape[1:]
    )


def _what_follows_agrees(tables: Tables, paths: Collection[str]) -> bool:
    """True if the next activation behind these modules, or the last one of all, agrees up to rounding."""
    baseline, candidate = tables
    outputs = [entry for key, entry in baseline.items() if key.phase == "forward" and not key.stage]
    last = max((entry.order for entry in outputs if entry.key.path in paths), default=-1)
    behind = sorted((entry for entry in outputs if entry.order > last), key=lambda entry: entry.order)
    return any(_agrees(entry, candidate[entry.key]) for entry in (*behind[:1], *behind[-1:]) if entry.key in candidate)


def _agrees(baseline: MergedSite, candidate: MergedSite) -> bool:
    if baseline.unobserved or candidate.unobserved or baseline.shape != candidate.shape:
        return False
    size = difference(Pair(baseline=baseline, candidate=candidate))
    u = max(UNIT_ROUNDOFF.get(one.dtype, 0.0) for one in (baseline, candidate))
    return size is not None and size <= max(_APART, 16.0 * u)


def _last_shapes(table: StepTable) -> dict[str, tuple[int, ...]]:
    """Shapes of what the module returns that returns last, by slot."""
    outputs = [entry for key, entry in table.items() if key.phase == "forward" and not key.stage]
    last = max(outputs, key=lambda entry: entry.order, default=None)
    if last is None:
        return {}
    return {entry.key.slot: entry.shape for entry in outputs if entry.key.path == last.key.path and not entry.key.call}
