"""Losses that do not decrease."""

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

ENDS = 16
"""Steps at the beginning and at the end of a run that are held against each other."""


class LossDecreases(Rule):
    """Losses whose last 16 steps have no smaller median than the first 16.

    A model that is nearly as good as it will get does not improve either, so it is a warning, and only after 100 steps.
    Only losses that are positive throughout are judged: of others (returns of a policy), and of trainings with several,
    what is better is not known.
    """

    name = "stalled-loss"
    finds = "The loss does not decrease."
    kinds = ("stalled-loss",)
    warns = True
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=100, says="steps that a run must have; fewer may be warm-up"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=ENDS)
        self._num_steps = 0
        self._positive = True
        self._seen: tuple[int, Entry] | None = None

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        loss = loss_of(table)
        if loss is not None:
            self._num_steps += 1
            self._positive = self._positive and loss[1] > 0.0
            self._seen = self._seen or (step, loss[0].without_parts())
            if len(self._first) < ENDS:
                self._first.append(loss[1])
            self._last.append(loss[1])
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        if self._seen is None or not self._positive or self._num_steps < max(self.limit("least_steps"), 2 * ENDS):
            return
        began, ended = median(self._first), median(self._last)
        if ended < began:
            return
        step, entry = self._seen
        says = (
            f"The loss does not decrease: its median is {began:.5g} over the first {ENDS} steps, and {ended:.5g} over "
            f"the last {ENDS} of {self._num_steps}. Look at the learning rate, at the labels, and whether the loss "
            "depends on what is trained."
        )
        evidence = {"began": began, "ended": ended, "num_steps": self._num_steps}
        yield finding_at(entry, step=step, kind="stalled-loss", says=says, evidence=evidence)
