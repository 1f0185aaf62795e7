"""Differences that the user accepts: taken out of the findings, and listed with their reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from traindiff.analyse.align.pairs import Unaligned
from traindiff.analyse.findings import Finding, more_text
from traindiff.core.maps.accepted import Accepted, AcceptedDifferences
from traindiff.core.site import ROOT, label

Alone = tuple[tuple[Unaligned, ...], tuple[Unaligned, ...]]
"""By run: sites that the other run lacks."""


def is_accepted(accepted: AcceptedDifferences, path: str, slot: str) -> Accepted | None:
    """The entry that names a site, by its path or by path and slot; None if there is none."""
    return accepted.of((path or ROOT, label(path, slot)))


def without_accepted(
    accepted: AcceptedDifferences, findings: Sequence[Finding], alone: Alone
) -> tuple[tuple[Finding, ...], Alone, list[str]]:
    """Findings and sites of one run that are not accepted; a sentence for each entry, used or not."""
    if not accepted.entries:
        return tuple(findings), alone, []
    listed: dict[Accepted, dict[str, None]] = {}

    def kept(one: Finding | Unaligned) -> bool:
        entry = is_accepted(accepted, one.path, one.slot)
        if entry is None:
            return True
        listed.setdefault(entry, {}).setdefault(f"{one.phase} of {label(one.path, one.slot)}")
        return False

    left = tuple(filter(kept, findings))
    alone = tuple(filter(kept, alone[0])), tuple(filter(kept, alone[1]))
    return left, alone, [*_sentences(listed.items()), *accepted.unused()]


def _sentences(listed: Iterable[tuple[Accepted, dict[str, None]]]) -> list[str]:
    return [
        f"Accepted, so not judged ({entry.reason}): {next(iter(sites))}{more_text(len(sites) - 1, 'site')}."
        for entry, sites in listed
    ]
