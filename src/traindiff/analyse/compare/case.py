"""One difference and everything that is known about it; what a test recognizes in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from traindiff.analyse.compare.mixtures import Mixture
from traindiff.analyse.merge.site import MergedSite


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A recognized shape: its kind, a message, and the numbers behind it."""

    kind: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One difference, with everything that a test may look at.

    Attributes:
        baseline: The baseline's entry.
        candidate: The candidate's entry.
        contributions: Gradient of each micro-batch of the candidate, by micro-step and rank, if recorded.
        expected: The same of the baseline.
        micro_steps: Number of micro-batches in the candidate's step.
        ranks: Number of ranks that share the batch, in the run that has more of them.
        difference: Relative L2 difference.
        floor: Its floor.
        previous: The baseline's summary in the step before, or in the evaluation of the loss before, if it has one.
        unit: The name of what lies before: `step` or `evaluation`.
        mixture: What most gradients of the step are of this step's and the step's before, if they are such a mixture.
        carried: Part that a gradient which was not set to zero has in the next one, relative to that one's own part.
        factors: Known factors, with what to say about each.
    """

    baseline: MergedSite
    candidate: MergedSite
    contributions: Mapping[tuple[int, int], Any] = field(default_factory=dict)
    expected: Mapping[tuple[int, int], Any] = field(default_factory=dict)
    micro_steps: int = 1
    ranks: int = 1
    difference: float = 0.0
    floor: float = 0.0
    previous: Any = None
    unit: str = "step"
    mixture: Mixture | None = None
    carried: float = 1.0
    factors: Sequence[tuple[float, str]] = ()
