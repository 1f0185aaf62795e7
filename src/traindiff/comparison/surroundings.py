"""What comes before the first divergence: where inputs still agree, and what lies unobserved in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from traindiff.alignment.pairs import Aligned
from traindiff.findings import Finding
from traindiff.merging.distance import Pair
from traindiff.merging.step_table import Entry
from traindiff.site import label

FLOW = ("batch", "forward", "loss", "backward")
"""Phases in which data flows from one site to the next in the order of execution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a step has before its first finding.

    Attributes:
        after: The last site before it that both runs have, and where they agree; empty if it is the first of all.
        unseen: Sites between the two that one run did not observe, by run.
    """

    after: str
    unseen: tuple[tuple[str, str], ...]


def surroundings(finding: Finding, pairs: Iterable[Pair], aligned: Aligned) -> Surroundings | None:
    """What comes before a finding in its step; None where its order says nothing of where data came from."""
    if finding.phase not in FLOW or finding.phase == "batch" or finding.kind in ("missing", "extra"):
        return None
    before = [
        pair.baseline for pair in pairs if pair.baseline.key.phase in FLOW and pair.baseline.order < finding.order
    ]
    flowing = [entry for entry in before if entry.key.path != "rng"]
    last = max(flowing, key=lambda entry: entry.order, default=None)
    place = {id(pair.candidate): pair.baseline.order for pair in aligned.pairs}
    candidates = sorted((pair.candidate for pair in aligned.pairs), key=lambda entry: entry.order)
    unseen: list[tuple[str, str]] = []
    low = last.order if last else -1
    for run, entries in (("candidate", aligned.only_baseline), ("baseline", aligned.only_candidate)):
        for entry in entries:
            order = entry.order if run == "candidate" else _placed(entry, candidates, place)
            if entry.key.phase == finding.phase and low <= order < finding.order:
                unseen.append((run, label(entry.key.path, entry.key.slot)))
    return Surroundings(after=label(last.key.path, last.key.slot) if last else "", unseen=tuple(unseen))


def with_surroundings(finding: Finding, found: Surroundings) -> Finding:
    """The finding, which then says that what it shows may have happened one hop earlier, where it may."""
    evidence = {**finding.evidence, "after": found.after}
    if not found.unseen:
        return replace(finding, evidence=evidence)
    run = found.unseen[0][0]
    names = [name for other, name in found.unseen if other == run]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    site, it = ("site", "it") if len(names) == 1 else ("sites", "one of them")
    hop = (
        f" Just before it, the {run} did not observe {len(names)} {site} that the other run has ({', '.join(names[:3])}"
        f"{more}): if what goes wrong is {it}, it shows here, one hop late."
    )
    return replace(finding, says=finding.says + hop, evidence={**evidence, "one_hop_late": names})


def _placed(entry: Entry, candidates: Sequence[Entry], place: dict[int, int]) -> int:
    """Place of an entry of the candidate in the baseline's order: that of the last pair before it."""
    before = [one for one in candidates if one.order < entry.order]
    return place[id(before[-1])] if before else -1
