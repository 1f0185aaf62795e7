"""The loss of a step, and how it develops over the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.rule import Limit, Rule
from traindiff.core.summary import number

_LOSS = SiteKey("loss", "", "loss", "backward")


def loss_of(table: StepTable) -> tuple[MergedSite, float] | None:
    """The argument of `backward` and its value, relative to the global loss.

    None if it was not observed, is not finite, or if the step has several: the role of each is unknown.
    """
    entry = table.get(_LOSS)
    if entry is None or entry.unobserved or _LOSS._replace(call=1) in table:
        return None
    value = number(entry.summary)
    return (entry, value) if math.isfinite(value) else None


class _LossTrend(Rule):
    """Follows the first and the last losses of a run."""

    ends: ClassVar[int]
    """Number of steps at the beginning and at the end of a run that are compared."""

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._first: list[float] = []
        self._last: deque[tuple[int, float, int]] = deque(maxlen=self.ends)  # step, loss, place in the order
        self._num_steps = 0
        self._positive = True
        self._began: tuple[int, MergedSite] | None = None

    def step(self, table: StepTable, *, step: int) -> tuple[Finding, ...]:
        """Note a step; the findings come at the end."""
        loss = loss_of(table)
        if loss is not None:
            entry, value = loss
            self._num_steps += 1
            self._positive = self._positive and value > 0.0
            self._began = self._began or (step, entry.without_parts())
            if len(self._first) < self.ends:
                self._first.append(value)
            self._last.append((step, value, entry.order))
        return ()

    @property
    def _is_judged(self) -> bool:
        """Whether there are enough losses, all of them positive."""
        return self._positive and self._num_steps >= max(self.limit("least_steps"), 2 * self.ends)


class LossDecreases(_LossTrend):
    """The median of the last 16 losses is not smaller than that of the first 16.

    A model that is nearly as good as it will get does not improve either, so it is a warning, and only after 100 steps.
    Only losses that are always positive are judged. For others (returns of a policy), and for trainings with several
    losses, it is unknown which value is better.
    """

    ends = 16
    name = "stalled-loss"
    finds = "The loss does not decrease."
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=100, message="steps that a run must have; fewer may be warm-up"),
    }

    def end(self) -> Iterator[Finding]:
        """Findings of the whole run."""
        if not self._is_judged or self._began is None:
            return
        began, ended = median(self._first), median(value for _, value, _ in self._last)
        if ended < began:
            return
        step, entry = self._began
        message = (
            f"The loss does not decrease: its median is {began:.5g} over the first {self.ends} steps, and {ended:.5g} "
            f"over the last {self.ends} of {self._num_steps}. Look at the learning rate, at the labels, and whether "
            "the loss depends on what is trained."
        )
        yield self.finding(entry, message, step=step, began=began, ended=ended, num_steps=self._num_steps)


class LossDoesNotDiverge(_LossTrend):
    """The losses end at twice the value that they began with, or more.

    All of the last 5 losses are above all of the first 5, and their median is twice the largest of these. Only losses
    that are always positive are judged. For others, and for trainings with several losses, it is unknown which value is
    worse.
    """

    ends = 5
    name = "diverging-loss"
    finds = "The loss ends far above where it began."
    limits: ClassVar[Mapping[str, Limit]] = {
        "factor": Limit(default=2.0, message="largest multiple of the first losses that the last ones may be"),
        "least_steps": Limit(default=20, message="steps that a run must have"),
    }

    def end(self) -> Iterator[Finding]:
        """Findings of the whole run."""
        if not self._is_judged or self._began is None:
            return
        began, ended = max(self._first), median(value for _, value, _ in self._last)
        if min(value for _, value, _ in self._last) <= began or ended <= self.limit("factor") * began:
            return
        step, _, order = self._last[0]
        entry = replace(self._began[1], order=order)
        message = (
            f"The loss ends at {ended:.4g}, {ended / began:.3g} x the largest of the first {self.ends} steps "
            f"({began:.4g}). Lower the learning rate, warm it up, or clip gradients."
        )
        yield self.finding(entry, message, step=step, began=began, ended=ended)
