"""What comes before the first divergence: where inputs still agree, and what lies unobserved in between."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from traindiff.analyse.align.pairs import Aligned
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import Pair, difference
from traindiff.analyse.merge.finding_at import finding_at
from traindiff.analyse.merge.parameters import Copies
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.step_table import Entry, Key
from traindiff.analyse.rules.ranks import KIND as DISAGREEMENT
from traindiff.core.observation import RECOMPUTED
from traindiff.core.site import label
from traindiff.core.summary import add, rounding


def changed_when_recomputed(table: Mapping[Key, Entry]) -> Iterator[Pair]:
    """Outputs that were not the same the second time, paired with the first time.

    Modules that are called several times in a step are left out: they are not recomputed in the order of
    their calls.
    """
    calls = Counter((key.path, key.slot) for key in table if key.phase == "forward" and not key.stage)
    for key, entry in table.items():
        first = table.get(key._replace(stage=""))
        if key.stage != RECOMPUTED or first is None or calls[key.path, key.slot] != 1:
            continue
        pair = Pair(baseline=first, candidate=entry)
        size = difference(pair)
        if size is None or size > rounding(entry.dtype):
            yield pair


def recomputation_findings(
    baseline: Mapping[Key, Entry], candidate: Mapping[Key, Entry], *, step: int
) -> list[Finding]:
    """What the candidate recomputes to something else, and the baseline does not."""
    known = {pair.candidate.key for pair in changed_when_recomputed(baseline)}
    found = []
    for pair in changed_when_recomputed(candidate):
        key = pair.candidate.key
        if key in known:
            continue
        size = difference(pair)
        message = (
            f"In the candidate, activation checkpointing computes {key.path} again and gets another output: "
            "another dropout mask, or an operation that is not deterministic?"
        )
        found.append(
            finding_at(
                pair.candidate, step=step, kind="recomputed", message=message,
                difference=math.inf if size is None else size, floor=rounding(pair.candidate.dtype),
            )
        )  # fmt: skip
    return found


def contributions(table: Mapping[Key, Entry]) -> dict[str, dict[tuple[int, int], Any]]:
    """By path: summaries by micro-step and rank; of copies on several ranks one."""
    found: dict[str, dict[tuple[int, int], Any]] = {}
    for key, entry in table.items():
        if key.phase != "grad" or key.stage != "micro" or key.call or entry.unobserved:
            continue
        terms = {(part.micro_step, part.term, part.shard): part for part in reversed(entry.parts)}
        by_place: dict[tuple[int, int], list[Any]] = {}
        for part in terms.values():
            by_place.setdefault((part.micro_step, part.rank), []).append(part.summary)
        found[key.path] = {place: add(parts) for place, parts in sorted(by_place.items())}
    return found


def with_names(finding: Finding, copies: Copies, rename: Rename = str) -> Finding:
    """The finding of copies that disagree, which then says where they have other names."""
    names = [
        f"rank {rank} calls it {path}"
        for rank, paths in copies.items()
        for path, first in paths.items()
        if rename(first) == finding.path
    ]
    if finding.kind != DISAGREEMENT or not names:
        return finding
    why = " Are the gradients of a tied parameter added up over the ranks that have it?"
    return replace(finding, message=f"{finding.message} ({', '.join(names)}.){why if finding.phase == 'grad' else ''}")


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
    return replace(finding, message=finding.message + hop, evidence={**evidence, "one_hop_late": names})


def _placed(entry: Entry, candidates: Sequence[Entry], place: dict[int, int]) -> int:
    """Place of an entry of the candidate in the baseline's order: that of the last pair before it."""
    before = [one for one in candidates if one.order < entry.order]
    return place[id(before[-1])] if before else -1
