"""Calls of modules that two runs divide otherwise: one call on all samples, or several calls on parts of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from traindiff.analyse.align.side import Tables
from traindiff.analyse.merge.site import MergedSite, RankPart, SiteKey, StepTable
from traindiff.core.observation import ITSELF, SAMPLE
from traindiff.core.summary import merge

_FLOWS = ("batch", "forward", "backward")

Calls = dict[SiteKey, dict[int, list[MergedSite]]]
"""Entries by site and call; several of one call if micro-steps could not be merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """A step in which the calls of some modules were brought together.

    Attributes:
        tables: Both tables. The inputs that are equal as a whole are left out. A scalar has one entry with a part for
            each call. Other sites have their calls as micro-steps, and cannot be compared row by row.
        sites: Those sites, without inputs and scalars.
        calls: By path of the modules whose calls were brought together: their calls in the run that has more.
    """

    tables: Tables
    sites: frozenset[SiteKey] = frozenset()
    calls: Mapping[str, int] = field(default_factory=dict)


def regrouped(tables: Tables) -> Regrouped:
    """Bring together the calls of modules that one run calls more often in a micro-step, on fewer samples each time.

    The number of backward passes does not matter: a training may add up the losses of several calls and call `backward`
    once, or join what several calls return. A module that one run really calls once more has more elements in that run,
    and is left alone. Inputs that are not the same elements as a whole are left to be compared.
    """
    sides = _calls(tables[0]), _calls(tables[1])
    both = [site for site in sides[0] if site in sides[1]]
    roots = [(site, (sides[0][site], sides[1][site])) for site in both if site.phase == "batch"]
    differ = {site for site, calls in roots if _are_other_inputs(*calls)}
    others = {site.path for site in differ}
    moved = {site.path for site, calls in roots if _are_moved(*calls)} - others
    judged = (site for site in both if site not in differ)
    found = [site for site in judged if _differs(site, sides, moved)]
    whole = dict.fromkeys(site for site in found if _counts(sides[0][site]) == _counts(sides[1][site]))
    if not whole:
        return Regrouped(tables=tables)
    scalars = {site for site in whole if _is_scalar((sides[0][site], sides[1][site]))}
    joined = [_joined(table, calls, whole, scalars) for table, calls in zip(tables, sides, strict=True)]
    flowing = frozenset(site for site in whole if site.phase != "batch" and site not in scalars)
    calls = {site.path: max(len(_entries(side[site])) for side in sides) for site in whole}
    return Regrouped(tables=(joined[0], joined[1]), sites=flowing, calls=calls)


def _calls(table: StepTable) -> Calls:
    found: Calls = {}
    for key, entry in table.items():
        if key.phase in _FLOWS and key.stage not in (SAMPLE, "evaluation") and key.path not in ("rng", ITSELF):
            site = key.of_calls
            found.setdefault(site, {}).setdefault(key.call, []).append(entry)
    return found


def _differs(site: SiteKey, sides: tuple[Calls, Calls], moved: Collection[str]) -> bool:
    baseline, candidate = (side[site] for side in sides)
    known = not any(entry.unobserved for calls in (baseline, candidate) for entry in _entries(calls))
    several = len(baseline) > 1 or len(candidate) > 1
    return known and several and (baseline.keys() != candidate.keys() or _is_inside(site.path, moved))


def _is_inside(path: str, roots: Collection[str]) -> bool:
    return any(not root or path == root or path.startswith(f"{root}.") for root in roots)


def _are_other_inputs(baseline: Mapping[int, list[MergedSite]], candidate: Mapping[int, list[MergedSite]]) -> bool:
    """True if two runs call a module on different elements."""
    return _elements(_entries(baseline)) != _elements(_entries(candidate))


def _are_moved(baseline: Mapping[int, list[MergedSite]], candidate: Mapping[int, list[MergedSite]]) -> bool:
    """True if two runs call a module equally often, on the same elements, and in another order."""
    if baseline.keys() != candidate.keys() or len(baseline) < 2:
        return False
    one, other = ([_elements(calls[call]) for call in sorted(calls)] for calls in (baseline, candidate))
    return one != other and sorted(one) == sorted(other)


def _elements(entries: Iterable[MergedSite]) -> tuple[int, int]:
    """Number of elements, and a fingerprint of them that does not depend on their order."""
    summaries = [entry.summary for entry in entries]
    whole = merge(summaries) if len(summaries) > 1 else summaries[0]
    return int(whole["count"]), int(whole["multiset"])


def _entries(calls: Mapping[int, list[MergedSite]]) -> list[MergedSite]:
    return [entry for call in sorted(calls) for entry in calls[call]]


def _counts(calls: Mapping[int, list[MergedSite]]) -> int | None:
    """Elements of all calls; None for scalars, of which each call has one."""
    entries = _entries(calls)
    return None if not any(entry.shape for entry in entries) else sum(int(one.summary["count"]) for one in entries)


def _is_scalar(sides: tuple[Mapping[int, list[MergedSite]], Mapping[int, list[MergedSite]]]) -> bool:
    return not any(entry.shape for calls in sides for entry in _entries(calls))


def _joined(
    table: StepTable, calls: Calls, whole: Collection[SiteKey], scalars: Collection[SiteKey]
) -> dict[SiteKey, MergedSite]:
    found = {key: one for key, one in table.items() if key.of_calls not in whole}
    for site in whole:
        entries = _entries(calls[site])
        if site.phase == "batch":
            continue
        if site in scalars:
            found[site] = _of_all_calls(site, calls[site])
            continue
        for number, entry in enumerate(entries):
            key = site._replace(micro_step=number)
            found[key] = replace(entry, key=key, parts=_renumbered(entry.parts, number))
    return dict(sorted(found.items(), key=lambda item: item[1].order))


def _of_all_calls(site: SiteKey, calls: Mapping[int, list[MergedSite]]) -> MergedSite:
    """A scalar with the values of all calls as its parts, as if each were of a micro-step of its own."""
    numbers: dict[tuple[int, int], int] = {}
    parts: list[RankPart] = []
    for call in sorted(calls):
        for part in (part for entry in calls[call] for part in entry.parts):
            number = numbers.setdefault((call, part.micro_step), len(numbers))
            parts.append(part._replace(micro_step=number))
    return replace(_entries(calls)[0], key=site, parts=tuple(parts), exact=False, summed=True)


def _renumbered(parts: Sequence[RankPart], number: int) -> tuple[RankPart, ...]:
    return tuple(part._replace(micro_step=number) for part in parts)
