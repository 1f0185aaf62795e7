"""Learning rates and other settings of optimizers: a part of the exact class, compared parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from traindiff.analyse.align.side import Side, Tables
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.finding_at import finding_at
from traindiff.analyse.merge.parameters import Groups
from traindiff.analyse.merge.step_table import Entry, Key
from traindiff.core.summary import UNIT_ROUNDOFF, number


class SettingChanges:
    """Tells each difference between the settings of two runs once: when it is first seen."""

    def __init__(self) -> None:
        self._told: set[tuple[str, float, float]] = set()
        self._before: dict[tuple[str, str], tuple[float, Entry]] = {}  # the baseline's, in the step before

    def findings(self, sides: tuple[Side, Side], tables: Tables, *, step: int) -> list[Finding]:
        """Settings that differ in a step, and have not differed so before."""
        found = check_hyper_parameters((tables[0], sides[0].groups), (tables[1], sides[1].groups), step=step)
        fresh = []
        for finding in found:
            change = (finding.slot, finding.evidence["baseline"], finding.evidence["candidate"])
            if change not in self._told:
                self._told.add(change)
                fresh.append(_one_step_late(finding, self._before))
        settings = settings_of(tables[0], sides[0].groups)
        self._before = {what: (value, entry.without_parts()) for what, (value, entry) in settings.items()}
        return fresh


def check_hyper_parameters(
    baseline: tuple[Mapping[Key, Entry], Groups], candidate: tuple[Mapping[Key, Entry], Groups], *, step: int
) -> Iterator[Finding]:
    """Compare learning rate and other settings of the optimizers, parameter by parameter."""
    there = settings_of(*candidate)
    differing: dict[tuple[str, float, float], list[str]] = {}
    entries: dict[tuple[str, float, float], Entry] = {}
    for (path, slot), (value, entry) in settings_of(*baseline).items():
        if (path, slot) in there and not _same_setting(value, (found := there[path, slot])[0]):
            change = (slot, value, found[0])
            differing.setdefault(change, []).append(path)
            entries.setdefault(change, entry)
    for (slot, before, after), paths in differing.items():
        among = paths[0] if len(paths) == 1 else f"{len(paths)} parameters ({', '.join(paths[:2])}, ...)"
        digits = 6 if f"{before:g}" != f"{after:g}" else 9
        values = f"{before:.{digits}g} in the baseline and {after:.{digits}g} in the candidate"
        message = f"{slot} is {values}, for {among}."
        evidence = {"baseline": before, "candidate": after, "parameters": len(paths), "paths": paths}
        entry = entries[slot, before, after]
        yield finding_at(entry, step=step, kind="hyper-parameter", message=message, evidence=evidence)


def _same_setting(baseline: float, candidate: float) -> bool:
    """Whether a setting has one value, as far as a schedule computed in float32 can tell."""
    return math.isclose(baseline, candidate, rel_tol=4.0 * UNIT_ROUNDOFF["float32"]) or (
        math.isnan(baseline) and math.isnan(candidate)
    )


def settings_of(table: Mapping[Key, Entry], groups: Groups) -> dict[tuple[str, str], tuple[float, Entry]]:
    """Value of each setting by parameter (by group, where its parameters are not known)."""
    found: dict[tuple[str, str], tuple[float, Entry]] = {}
    for key, entry in table.items():
        if key.group is None:
            continue
        name, index = key.group
        members = groups.get(name, [])
        for path in members[index] if index < len(members) else [key.path]:
            found[path, key.slot] = (number(entry.summary), entry)
    return found


def _one_step_late(finding: Finding, before: Mapping[tuple[str, str], tuple[float, Entry]]) -> Finding:
    """The finding of a setting, which says so if the candidate's is what the baseline had in the step before.

    Args:
        finding: From `check_hyper_parameters`.
        before: The baseline's settings in the step before.
    """
    held = before.get((finding.evidence["paths"][0], finding.slot))
    if held is None or not _same_setting(held[0], finding.evidence["candidate"]):
        return finding
    message = finding.message + " That is what the baseline had in the step before: one step late?"
    return replace(finding, message=message, evidence={**finding.evidence, "late": True})
