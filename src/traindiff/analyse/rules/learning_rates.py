"""Learning rates of a step, and whether a loss scaler left the step out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable, is_loss_scale
from traindiff.analyse.rules.rule import Found, Limit, Repeated, RepeatedRule, Rule, RunFacts
from traindiff.core.observation import SKIPPED
from traindiff.core.summary import nonfinite_count, number

SCHEDULED = "initial_lr"
"""Setting that torch's schedulers write into the groups of an optimizer when they are made."""


@dataclass(slots=True, kw_only=True)
class _Rate:
    entry: MergedSite
    value: float
    first: int
    num_steps: int = 0


class ScheduleIsFollowed(Rule):
    """The learning rate of groups with a torch scheduler never changes.

    A scheduler writes `initial_lr` into the groups of its optimizer. If nobody calls its `step`, the learning rate
    stays the same. It also does so under a constant schedule, and until the first epoch ends, so it is a warning.
    """

    name = "unchanged-learning-rate"
    finds = "The learning rate never changes, although there is a scheduler."
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=200, message="steps that a run must have; schedules by epoch wait for long"),
    }

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._rates: dict[str, _Rate] = {}
        self._changing: set[str] = set()

    def step(self, table: StepTable, *, step: int) -> tuple[Finding, ...]:
        """Note a step; the findings come at the end."""
        for key, entry in table.items():
            if (
                not key.group
                or key.slot != "lr"
                or key.path in self._changing
                or key._replace(slot=SCHEDULED) not in table
            ):
                continue
            value = number(entry.summary)
            rate = self._rates.get(key.path)
            if rate is None:
                rate = self._rates[key.path] = _Rate(entry=entry.without_parts(), value=value, first=step)
            if rate.value != value:
                self._changing.add(key.path)
                del self._rates[key.path]
            rate.num_steps += 1
        return ()

    def end(self) -> Iterator[Finding]:
        """Findings of the whole run."""
        for path, rate in self._rates.items():
            if rate.num_steps < self.limit("least_steps"):
                continue
            message = (
                f"The learning rate of {path} is {rate.value:g} in all of {rate.num_steps} steps, although a scheduler "
                "was made for it. Does anything call scheduler.step()?"
            )
            yield self.finding(rate.entry, message, step=rate.first, learning_rate=rate.value, num_steps=rate.num_steps)


def may_be_left_out(table: StepTable) -> bool:
    """Whether a loss scaler left the step out, or may have: it does so if any gradient is not finite."""
    return any(
        (key.phase == "optimizer" and key.slot == SKIPPED)
        or (key[:2] == ("grad", "") and not entry.unobserved and nonfinite_count(entry.summary))
        for key, entry in table.items()
    )


def is_left_out(table: StepTable) -> bool:
    """Whether a loss scaler left the step out: it is marked, or there is a scale and a gradient is not finite.

    A fused optimizer leaves steps out itself, and sets no mark.
    """
    if any(key.phase == "optimizer" and key.slot == SKIPPED for key in table):
        return True
    return has_loss_scale(table) and may_be_left_out(table)


def has_loss_scale(table: StepTable) -> bool:
    """Whether the loss of the step was multiplied by a loss scale."""
    return any(is_loss_scale(key) for key in table)


def learning_rates(table: StepTable) -> dict[str, float]:
    """Learning rates by the path of their group."""
    return {
        key.path: number(entry.summary)
        for key, entry in table.items()
        if key.group and key == SiteKey("optimizer", "", key.path, "lr")
    }


def largest_rate(path: str, rates: Mapping[str, float], facts: RunFacts) -> float:
    """The largest learning rate of the groups that hold a parameter; 0 where none was recorded."""
    return max((rates.get(group, 0.0) for group in facts.held_in.get(path, ())), default=0.0)


def optimizer_of(table: StepTable) -> str:
    """Name of the optimizer that took a step, as the paths of its groups have it."""
    return min(learning_rates(table), default="optimizer").rpartition(".groups[")[0]


def moves_parameters(table: StepTable) -> bool:
    """Whether the optimizer was to move anything: no loss scaler left the step out, and some learning rate is not 0.

    If no learning rate was recorded, it is assumed to be set.
    """
    rates = learning_rates(table)
    return not may_be_left_out(table) and (not rates or any(rates.values()))


class LearningRateIsSet(RepeatedRule):
    """The learning rates of all groups of an optimizer are 0 for several steps in a row: nothing moves.

    A warm-up begins at 0 for one step, and a decay may end there. Single groups may rest at 0.
    """

    name = "zero-learning-rate"
    finds = "All learning rates are 0, step after step."
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=10, message="steps in a row in which it must be so; warm-ups begin with one"),
    }

    def _wrong(self, table: StepTable) -> Found | None:
        rates = learning_rates(table)
        if not rates:
            return None
        path = min(rates)
        return {} if any(rates.values()) else {path: (table[SiteKey("optimizer", "", path, "lr")], {})}

    def _series(self, table: StepTable) -> str:
        return optimizer_of(table)

    def _message(self, row: Repeated) -> str:
        return (
            f"The learning rate is 0 in {row.num_steps} steps in a row, from step {row.first} on: nothing is learned. "
            "Look at the schedule: does it end before the training, and does anything step it?"
        )
