"""Losses that end far above where they began."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from statistics import median
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.losses import loss_of
from traindiff.rules.rule import Limit, Rule

ENDS = 5
"""Steps at the beginning and at the end of a run that are held against each other."""


class LossDoesNotDiverge(Rule):
    """Losses that end at twice what they began with, or more.

    All of the last 5 steps are above all of the first 5, and their median is twice the largest of these. Only losses
    that are positive throughout are judged: of others, and of trainings with several, what is worse is not known.
    """

    name = "diverging-loss"
    finds = "The loss ends far above where it began."
    kinds = ("diverging-loss",)
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "factor": Limit(default=2.0, says="largest multiple of the first losses that the last ones may be"),
        "least_steps": Limit(default=20, says="steps that a run must have"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._first: list[float] = []
        self._last: deque[tuple[int, float, Entry]] = deque(maxlen=ENDS)
        self._num_steps = 0
        self._positive = True

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        loss = loss_of(table)
        if loss is None:
            return ()
        entry, value = loss
        self._num_steps += 1
        self._positive = self._positive and value > 0.0
        if len(self._first) < ENDS:
            self._first.append(value)
        self._last.append((step, value, entry.without_parts()))
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        if self._num_steps < max(self.limit("least_steps"), 2 * ENDS) or not self._positive:
            return
        began, ended = max(self._first), median(value for _, value, _ in self._last)
        if min(value for _, value, _ in self._last) <= began or ended <= self.limit("factor") * began:
            return
        step, _, entry = self._last[0]
        says = (
            f"The loss ends at {ended:.4g}, {ended / began:.3g} x the largest of the first {ENDS} steps ({began:.4g}). "
            "Lower the learning rate, warm it up, or clip gradients."
        )
        evidence = {"began": began, "ended": ended}
        yield finding_at(entry, step=step, kind="diverging-loss", says=says, evidence=evidence)
