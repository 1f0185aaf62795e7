"""How long a rank may take."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_STEP_SECONDS = 600.0
"""Until the first step has ended: imports, building the model, compiling."""

LEAST_SECONDS = 60.0
"""For each step after that, at least."""

FACTOR = 10.0
"""A step may take so many times the slowest one before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a rank may go without ending a step.

    Attributes:
        seconds: Always so long; None for what is usual: `FIRST_STEP_SECONDS` for the first step, then `FACTOR` times
            the slowest step, but at least `LEAST_SECONDS`.
    """

    seconds: float | None = None

    def limit(self, slowest_seconds: float | None) -> float:
        """Seconds until a rank is taken to hang.

        Args:
            slowest_seconds: What the slowest step took; None before the first has ended.
        """
        if self.seconds is not None:
            return self.seconds
        return FIRST_STEP_SECONDS if slowest_seconds is None else max(LEAST_SECONDS, FACTOR * slowest_seconds)
