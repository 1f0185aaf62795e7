"""What a comparison says of the operators inside a module whose numbers differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from traindiff.findings.finding import ratio_of
from traindiff.site import ROOT, label

ZoomCause = Literal["operator", "other-operators", "other-inputs", "none"]
"""What the first difference inside a module is.

* `operator`: an operator whose inputs agree and whose output does not.
* `other-operators`: between two that agree, the runs call other operators.
* `other-inputs`: the first operator of the module that differs is given other inputs already.
* `none`: every operator that both runs have agrees.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutOperator:
    """What one run knows of an operator beside its numbers.

    Attributes:
        path: Where it ran, its name and its number there.
        source: File, line and function from which it was called; empty where that is not known.
        code: The line itself.
        settings: Its arguments that are no tensors, as text.
        node: Of one that ran in a backward pass: the node of the graph.
        of: The operator of the forward pass that made the node.
    """

    path: str
    source: str = ""
    code: str = ""
    settings: Mapping[str, str]
    node: str = ""
    of: str = ""

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return {
            "path": self.path,
            "source": self.source,
            "code": self.code,
            "settings": dict(self.settings),
            "node": self.node,
            "of": self.of,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """An operator, as a walk through a module comes to it.

    Attributes:
        baseline: The baseline's; None where only the candidate has it.
        candidate: The candidate's; None where only the baseline has it.
        given: Largest relative L2 difference of its inputs; inf without a size, NaN where it is in one run only.
        made: The same of its outputs.
        floor: What `made` may be: of the output that is furthest above its own.
        says: What it is, in a word or two.
    """

    baseline: AboutOperator | None
    candidate: AboutOperator | None
    given: float = math.nan
    made: float = math.nan
    floor: float = 0.0
    says: str = ""

    @property
    def shown(self) -> AboutOperator:
        """The operator in the run in question, or in the one that has it."""
        found = self.candidate or self.baseline
        assert found is not None
        return found

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values; sizes that are not finite become null."""
        return {
            "baseline": self.baseline.to_json() if self.baseline else None,
            "candidate": self.candidate.to_json() if self.candidate else None,
            "inputs": _finite(self.given),
            "outputs": _finite(self.made),
            "floor": _finite(self.floor),
            "says": self.says,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Zoom:
    """A finding, taken apart into the operators of its module.

    Attributes:
        step: Step of the finding.
        micro_step: Micro-step of the operators.
        rank: Rank that ran them.
        phase: Phase of the finding.
        path: Path of the finding.
        slot: Its slot.
        module: Inside which the first difference is; empty for the root.
        cause: What the first difference is.
        operator: The first operator that differs, as the candidate recorded it; empty where there is none.
        operator_slot: Which of its outputs, or inputs.
        difference: How far that is from the baseline's.
        floor: How far it might be.
        says: Two or three sentences.
        rows: The walk up to there, and a little further.
        num_operators: How many operators of the module, or modules, both runs have together.
    """

    step: int
    micro_step: int
    rank: int
    phase: str
    path: str
    slot: str
    module: str
    cause: ZoomCause
    operator: str = ""
    operator_slot: str = ""
    difference: float = math.nan
    floor: float = 0.0
    says: str
    rows: tuple[OperatorRow, ...] = ()
    num_operators: int = 0

    @property
    def site(self) -> str:
        """The finding's site as people read it."""
        return label(self.path, self.slot)

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values; sizes that are not finite become null."""
        return {
            "step": self.step,
            "micro_step": self.micro_step,
            "rank": self.rank,
            "phase": self.phase,
            "site": self.path or ROOT,
            "slot": self.slot,
            "module": self.module or ROOT,
            "cause": self.cause,
            "operator": self.operator,
            "operator_slot": self.operator_slot,
            "difference": _finite(self.difference),
            "ratio": _finite(ratio_of(self.difference, self.floor)),
            "says": self.says,
            "rows": [row.to_json() for row in self.rows],
            "num_operators": self.num_operators,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
