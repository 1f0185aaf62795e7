"""A finding at an entry of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.step_table import Entry


def finding_at(
    entry: Entry,
    *,
    step: int,
    kind: str,
    message: str,
    evidence: Mapping[str, Any] | None = None,
    difference: float = math.inf,
    floor: float = 0.0,
    rank: int | None = None,
    micro_step: int | None = None,
) -> Finding:
    """A finding at the entry's site and place in the order of execution.

    Args:
        entry: Where it is.
        step: Number of the step.
        kind: What it is, in a word (docs/findings.md).
        message: What is wrong, in a sentence or two.
        evidence: The numbers behind `message`.
        difference: Relative L2 difference; inf for what has no size.
        floor: The largest relative difference that would not have been a finding.
        rank: Rank, where it is on one only.
        micro_step: Micro-step, where it is in one only.
    """
    key = entry.key
    return Finding(
        step=step,
        micro_step=micro_step,
        rank=rank,
        phase=key.phase,
        stage=key.stage,
        path=key.path,
        slot=key.slot,
        call=key.call,
        order=entry.order,
        kind=kind,
        difference=difference,
        floor=floor,
        message=message,
        evidence=evidence or {},
    )
