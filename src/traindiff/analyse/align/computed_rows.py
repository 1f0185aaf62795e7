"""Modules that one run computes for all rows, and the other for chosen rows only: experts of a mixture."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from traindiff.analyse.align.side import Tables
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedRows:
    """A step without the sites of which one run computes all rows.

    Attributes:
        tables: Both tables.
        without: The baseline's entries of those sites.
    """

    tables: Tables
    without: tuple[MergedSite, ...] = ()


def without_other_rows(tables: Tables) -> ComputedRows:
    """Leave out activations that run over all samples in one run, and over rows that were chosen in the other.

    A run may compute each expert for the rows that a router gives it, or for all rows and multiply the others by 0.
    What the experts return together is the same, and so are all gradients of parameters. So this is only done if what
    the model returns has the same shape in both runs: if rows are lost for good, the first site without them is named.
    Calls that have as many rows together in both runs are only divided otherwise (see `regrouped`).
    """
    baseline, candidate = tables
    counts = _elements(baseline), _elements(candidate)
    found = [
        key
        for key, entry in baseline.items()
        if key in candidate
        and _are_other_rows(entry, candidate[key])
        and counts[0][key.of_calls] != counts[1][key.of_calls]
    ]
    if not found or _last_shapes(baseline) != _last_shapes(candidate):
        return ComputedRows(tables=tables)
    places = {key._replace(phase="", slot="") for key in found}
    one, other = (
        {key: entry for key, entry in table.items() if key._replace(phase="", slot="") not in places or not _flows(key)}
        for table in tables
    )
    return ComputedRows(tables=(one, other), without=tuple(baseline[key] for key in found))


def _flows(key: SiteKey) -> bool:
    return key.phase in ("forward", "backward") and not key.stage


def _elements(table: StepTable) -> Counter[SiteKey]:
    """Elements of all calls of a step, by site."""
    found: Counter[SiteKey] = Counter()
    for key, entry in table.items():
        if _flows(key) and not entry.unobserved:
            found[key.of_calls] += int(entry.summary["count"])
    return found


def _are_other_rows(baseline: MergedSite, candidate: MergedSite) -> bool:
    return (
        _flows(baseline.key)
        and not (baseline.unobserved or candidate.unobserved)
        and baseline.batched != candidate.batched
        and len(baseline.shape) == len(candidate.shape) > 0
        and baseline.shape[0] != candidate.shape[0]
        and baseline.shape[1:] == candidate.shape[1:]
    )


def _last_shapes(table: StepTable) -> dict[str, tuple[int, ...]]:
    """Shapes of what the module returns that returns last, by slot."""
    outputs = [entry for key, entry in table.items() if key.phase == "forward" and not key.stage]
    last = max(outputs, key=lambda entry: entry.order, default=None)
    if last is None:
        return {}
    return {entry.key.slot: entry.shape for entry in outputs if entry.key.path == last.key.path and not entry.key.call}
