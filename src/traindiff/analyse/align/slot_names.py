"""Inputs and outputs with other names in two runs: `input[0]` and `input.input_ids`, `output[0]` and `output.logits`.

One run gives a module its arguments by name, or returns an object in place of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from traindiff.analyse.align.side import Tables
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable

_PHASES = frozenset({"batch", "forward", "backward"})

_Group = tuple[SiteKey, tuple[int, ...], bool]


def with_common_slots(tables: Tables) -> Tables:
    """Both tables, the candidate's with the baseline's names of inputs and outputs that only differ in their names.

    A tensor is the other one if it is the only one of its shape that a call of this module has and the other run's
    call has not, on both sides.
    """
    baseline, candidate = tables
    here, there = _alone(baseline, candidate), _alone(candidate, baseline)
    names = {
        keys[0]: here[group][0]
        for group, keys in there.items()
        if len(keys) == len(here.get(group, ())) == 1
    }  # fmt: skip
    if not names:
        return tables
    renamed: dict[SiteKey, MergedSite] = {}
    for key, entry in candidate.items():
        other = names.get(key)
        renamed[other or key] = entry if other is None else replace(entry, key=other)
    return baseline, renamed


def _alone(own: StepTable, other: StepTable) -> dict[_Group, list[SiteKey]]:
    """Keys that only one table has, by what they have in common with the other's."""
    found: dict[_Group, list[SiteKey]] = {}
    for key in _without_counterpart(own, other):
        entry = own[key]
        if not entry.unobserved:
            group = (key._replace(slot=""), tuple(entry.shape), "int" in entry.dtype)
            found.setdefault(group, []).append(key)
    return found


def _without_counterpart(own: StepTable, other: StepTable) -> Iterable[SiteKey]:
    return (key for key in own if key.phase in _PHASES and key not in other)
