"""What activation checkpointing computes a second time: held against the first time, within one run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from traindiff.findings import Finding
from traindiff.merging.distance import Pair, difference
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.observation import RECOMPUTED
from traindiff.rounding import rounding


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
        says = (
            f"In the candidate, activation checkpointing computes {key.path} again and gets another output: "
            "another dropout mask, or an operation that is not deterministic?"
        )
        found.append(
            finding_at(
                pair.candidate, step=step, kind="recomputed", says=says,
                difference=math.inf if size is None else size, floor=rounding(pair.candidate.dtype),
            )
        )  # fmt: skip
    return found
