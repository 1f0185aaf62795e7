"""One judged difference or broken rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from traindiff.site import ROOT, label


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One judged difference.

    Attributes:
        step: Step in which it is.
        micro_step: Micro-step, where the recordings tell it.
        rank: Rank, where it is on one only.
        phase: Phase of the observation.
        stage: Stage within the phase; empty for the plain one.
        path: Canonical path; empty for the root.
        slot: Which tensor there.
        call: Which call of the module in the micro-step.
        order: Position in the baseline's execution order.
        kind: What the difference looks like, in a word (docs/findings.md lists them).
        difference: Relative L2 difference; inf where it has no size (exact comparisons, NaN).
        floor: The largest relative difference that would not have been a finding.
        says: What differs and what it looks like, in one or two sentences.
        evidence: The numbers behind `says`.
    """

    step: int
    micro_step: int | None = None
    rank: int | None = None
    phase: str
    stage: str = ""
    path: str
    slot: str
    call: int = 0
    order: int
    kind: str
    difference: float = math.inf
    floor: float = 0.0
    says: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Difference over floor; inf for differences without a size."""
        return ratio_of(self.difference, self.floor)

    @property
    def site(self) -> str:
        """The site as people read it."""
        return label(self.path, self.slot)

    def to_json(self) -> dict[str, Any]:
        """The finding in the schema of `--json`; sizes that are not finite become null."""
        return {
            "step": self.step,
            "micro_step": self.micro_step,
            "rank": self.rank,
            "phase": self.phase,
            "stage": self.stage,
            "site": self.path or ROOT,
            "slot": self.slot,
            "call": self.call,
            "kind": self.kind,
            "ratio": _finite(self.ratio),
            "difference": _finite(self.difference),
            "floor": _finite(self.floor),
            "says": self.says,
            "evidence": {name: _finite(value) for name, value in self.evidence.items()},
        }


def ratio_of(difference: float, floor: float) -> float:
    """Difference over floor; inf for a difference without a floor, 0 where the floor is without bound."""
    if difference == 0.0:
        return 0.0
    if math.isinf(floor):
        return 0.0
    return difference / floor if floor else math.inf


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
