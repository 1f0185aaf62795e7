"""One difference that is to be diagnosed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from traindiff.merging.step_table import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A recognised shape: a word for it, what to say, and the numbers behind it."""

    kind: str
    says: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything a test may look at.

    Attributes:
        baseline: The baseline's entry.
        candidate: The candidate's entry.
        contributions: What each micro-batch of the candidate brought to this gradient, by micro-step and rank, if
            recorded.
        micro_steps: How many micro-batches the candidate's step had.
        ranks: Over how many ranks the batch is divided, in the run that has more of them.
        difference: Relative L2 difference.
        floor: Its floor.
        previous: The baseline's summary in the step before, if it has one.
        factors: Factors of which something is known, and what to say of them.
    """

    baseline: Entry
    candidate: Entry
    contributions: Mapping[tuple[int, int], Any] = field(default_factory=dict)
    micro_steps: int = 1
    ranks: int = 1
    difference: float = 0.0
    floor: float = 0.0
    previous: Any = None
    factors: Sequence[tuple[float, str]] = ()
