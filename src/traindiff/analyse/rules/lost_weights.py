"""Steps that throw away what all weights held."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.losses import loss_of
from traindiff.analyse.rules.optimizers import largest_rate, learning_rates
from traindiff.analyse.rules.rule import Contents, Limit, Rule
from traindiff.analyse.rules.weights import weight_updates
from traindiff.core.summary import distance, norm_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leap:
    """A step that moved the weights by a multiple of their norm."""

    step: int
    update: MergedSite
    ratio: float
    rate: float


class StepsKeepWeights(Rule):
    """A step moves all weights together by a multiple of their norm, and the next loss is far above all before it.

    What the weights held (the initialization, a checkpoint) is lost, even if the loss comes down again. A step that
    leaps far is no finding by itself: weights that begin near 0 leave it with their first step. In the trainings of
    benchmarks/zoo that stay finite, no step moves the weights by more than 0.12 of their norm. Only losses that are
    always positive are judged.
    """

    name = "lost-weights"
    finds = "A step moves all weights by a multiple of their norm, and the loss jumps far above all losses before."
    needs = "a single loss, on which backward() is called in each step"
    limits: ClassVar[Mapping[str, Limit]] = {
        "ratio": Limit(
            default=3.0, message="largest norm of all updates of a step, as a multiple of the weights' norm"
        ),
        "factor": Limit(default=10.0, message="largest multiple of the losses so far that the next loss may be"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return loss_of(contents.table) is not None

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._leap: _Leap | None = None
        self._largest = 0.0
        self._told = False

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """At most one finding in a run."""
        found = loss_of(table)
        if found is None or self._told:
            return
        _, value = found
        if value <= 0.0:
            self._told = True  # it is unknown which losses are worse
            return
        leap = self._leap
        if leap is not None and leap.step == step - 1 and value > self.limit("factor") * self._largest:
            self._told = True
            rate = f" (learning rate {leap.rate:.3g})" if leap.rate else ""
            message = (
                f"Step {leap.step} moves all weights together by {leap.ratio:.3g} x their norm{rate}, and the loss "
                f"jumps from at most {self._largest:.4g} to {value:.4g}: what the weights held is lost. Lower the "
                "learning rate, warm it up, or clip gradients."
            )
            yield self.finding(
                leap.update, message, step=leap.step, ratio=leap.ratio, before=self._largest, value=value
            )
        self._largest = max(self._largest, value)
        self._leap = self._leap_of(table, step=step)

    def _leap_of(self, table: StepTable, *, step: int) -> _Leap | None:
        """The step as a leap; None if it moves the weights by less than the limit."""
        moved = before = 0.0
        first: tuple[float, MergedSite] | None = None
        for update, _ in weight_updates(table):
            parameter = table[SiteKey("param", "", update.key.path, "value")]
            size = norm_of(update.summary)
            moved += size**2
            before += float(distance(parameter.summary, update.summary)) ** 2
            if first is None or size > first[0]:
                first = size, update
        if first is None or moved <= self.limit("ratio") ** 2 * before or not before:
            return None
        rate = largest_rate(first[1].key.path, learning_rates(table), self.facts)
        return _Leap(step=step, update=first[1].without_parts(), ratio=math.sqrt(moved / before), rate=rate)
