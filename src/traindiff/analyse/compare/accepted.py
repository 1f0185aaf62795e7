"""Differences that the user sets aside: taken out of the findings, and listed.

An accepted difference has a reason, and what follows from it is accepted too. An ignored site has none. What follows
from a difference at an ignored site was not judged by itself, so the verdict is then `incomplete` at best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from traindiff.analyse.align.pairs import Unaligned
from traindiff.analyse.compare.verdict import SiteDifference
from traindiff.analyse.findings import Finding, more_text
from traindiff.core.maps.accepted import Accepted, AcceptedDifferences
from traindiff.core.site import ROOT, label

Alone = tuple[tuple[Unaligned, ...], tuple[Unaligned, ...]]
"""By run: sites that the other run lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """What is left of a comparison without what the user sets aside.

    Attributes:
        findings: Findings that count.
        alone: By run, sites that the other run lacks.
        notes: A sentence for each entry, used or not.
        accepted: Number of sites that differ and are accepted.
        ignored: Number of sites that differ and are ignored.
        follows: A sentence if sites follow from what is ignored; empty otherwise.
    """

    findings: tuple[Finding, ...]
    alone: Alone
    notes: tuple[str, ...] = ()
    accepted: int = 0
    ignored: int = 0
    follows: str = ""


def _names(one: Finding | Unaligned | SiteDifference) -> tuple[str, str]:
    return one.path or ROOT, label(one.path, one.slot)


def without_accepted(
    accepted: AcceptedDifferences, findings: Sequence[Finding], alone: Alone, rows: Sequence[SiteDifference]
) -> Remaining:
    """Findings and sites of one run that the user does not set aside.

    Args:
        accepted: What the user sets aside.
        findings: All findings.
        alone: By run, sites that the other run lacks.
        rows: All sites that were compared.
    """
    if not accepted.entries:
        return Remaining(findings=tuple(findings), alone=alone)
    listed: dict[Accepted, dict[str, None]] = {}

    def kept(one: Finding | Unaligned) -> bool:
        entry = accepted.of(_names(one))
        if entry is None:
            return True
        listed.setdefault(entry, {}).setdefault(f"{one.phase} of {label(one.path, one.slot)}")
        return False

    left = tuple(filter(kept, findings))
    remaining = tuple(filter(kept, alone[0])), tuple(filter(kept, alone[1]))
    ignored = [one for one in accepted.entries if one.is_ignored]
    everything: list[Finding | Unaligned | SiteDifference] = [*rows, *alone[0], *alone[1], *findings]
    known = [_names(one) for one in everything]
    counts = {
        ignores: len({site for entry, sites in listed.items() if entry.is_ignored is ignores for site in sites})
        for ignores in (False, True)
    }
    notes = (*_accepted(listed.items()), *_ignored(ignored, listed, known), *accepted.unused())
    follows = _follows(ignored, rows) if counts[True] and not left else ""
    return Remaining(
        findings=left, alone=remaining, notes=notes, accepted=counts[False], ignored=counts[True], follows=follows
    )


def _accepted(listed: Iterable[tuple[Accepted, dict[str, None]]]) -> Iterator[str]:
    for entry, sites in listed:
        if not entry.is_ignored:
            more = more_text(len(sites) - 1, "site")
            yield f"Accepted, so not judged ({entry.reason}): {next(iter(sites))}{more}."


def _ignored(
    entries: Sequence[Accepted], listed: dict[Accepted, dict[str, None]], known: Sequence[tuple[str, str]]
) -> Iterator[str]:
    for entry in entries:
        matched = len({names for names in known if entry.names(names)})
        differing = list(listed.get(entry, ()))
        if not matched:
            yield f'Warning: no site is named "{entry.name}", as --ignore says.'
            continue
        sites = "1 site" if matched == 1 else f"{matched} sites"
        which = f"{differing[0]}{more_text(len(differing) - 1, 'site')}" if differing else "none"
        yield f'Ignored, so not judged ("{entry.name}"): {sites}, of which {which} would be a finding.'


def _follows(ignored: Sequence[Accepted], rows: Sequence[SiteDifference]) -> str:
    found = [
        row
        for row in rows
        if row.word in ("follows", "not judged") and not any(entry.names(_names(row)) for entry in ignored)
    ]
    if not found:
        return ""
    first, more = found[0], more_text(len(found) - 1, "site")
    return (
        f"What is ignored differs, and {first.phase} of {label(first.path, first.slot)}{more} may follow from it, so "
        "that was not judged by itself. Use --accept for differences that are intended with all that follows."
    )
