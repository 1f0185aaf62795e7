"""What a step was given to move parameters by: learning rates, and whether a loss scaler left it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.finding_at import finding_at
from traindiff.analyse.merge.loss_scale import is_loss_scale
from traindiff.analyse.merge.step_table import Entry, Key
from traindiff.analyse.rules.rule import InARow, Limit, Rule
from traindiff.core.observation import SKIPPED
from traindiff.core.summary import nonfinite_count, number

SCHEDULED = "initial_lr"
"""What torch's schedulers write into the groups of an optimizer when they are made."""


@dataclass(slots=True, kw_only=True)
class _Rate:
    entry: Entry
    value: float
    first: int
    num_steps: int = 0


class ScheduleIsFollowed(Rule):
    """Learning rates of groups that have a torch scheduler, and that never change.

    A scheduler writes `initial_lr` into the groups of its optimizer. Where nobody calls its `step`, the learning rate
    stays what it was; it also does so under a constant schedule, and until the first epoch ends, so it is a warning.
    """

    name = "unchanged-learning-rate"
    finds = "The learning rate never changes, although there is a scheduler."
    kinds = ("unchanged-learning-rate",)
    warns = True
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=200, message="steps that a run must have; schedules by epoch wait for long"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._rates: dict[str, _Rate] = {}
        self._changing: set[str] = set()

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
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
        """See the class."""
        for path, rate in self._rates.items():
            if rate.num_steps < self.limit("least_steps"):
                continue
            message = (
                f"The learning rate of {path} is {rate.value:g} in all of {rate.num_steps} steps, although a scheduler "
                "was made for it. Does anything call scheduler.step()?"
            )
            evidence = {"learning_rate": rate.value, "num_steps": rate.num_steps}
            yield finding_at(
                rate.entry, step=rate.first, kind="unchanged-learning-rate", message=message, evidence=evidence
            )


def may_be_left_out(table: Mapping[Key, Entry]) -> bool:
    """Whether a loss scaler has left the step out, or may have: it does that where any gradient is not finite."""
    return any(
        (key.phase == "optimizer" and key.slot == SKIPPED)
        or (key[:2] == ("grad", "") and not entry.unobserved and nonfinite_count(entry.summary))
        for key, entry in table.items()
    )


def is_left_out(table: Mapping[Key, Entry]) -> bool:
    """Whether a loss scaler has left the step out: it is marked, or there is a scale and a gradient is not finite.

    A fused optimizer leaves steps out itself, and sets no mark.
    """
    if any(key.phase == "optimizer" and key.slot == SKIPPED for key in table):
        return True
    return has_loss_scale(table) and may_be_left_out(table)


def has_loss_scale(table: Mapping[Key, Entry]) -> bool:
    """Whether the loss of the step was multiplied by a loss scale."""
    return any(is_loss_scale(key) for key in table)


def learning_rates(table: Mapping[Key, Entry]) -> dict[str, float]:
    """Learning rates by the path of their group."""
    return {
        key.path: number(entry.summary)
        for key, entry in table.items()
        if key.group and key == Key("optimizer", "", key.path, "lr", 0, 0)
    }


def moves_parameters(table: Mapping[Key, Entry]) -> bool:
    """Whether the optimizer was to move anything: no loss scaler left the step out, and some learning rate is not 0.

    Where no learning rate was recorded, that is taken for granted.
    """
    rates = learning_rates(table)
    return not may_be_left_out(table) and (not rates or any(rates.values()))


class LearningRateIsSet(Rule):
    """Steps in a row in which the learning rates of all groups of an optimizer are 0: nothing moves.

    A warm-up begins at 0 for one step, and a decay may end there. Single groups may rest at 0.
    """

    name = "zero-learning-rate"
    finds = "All learning rates are 0, step after step."
    kinds = ("zero-learning-rate",)
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=10, message="steps in a row in which it must be so; warm-ups begin with one"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: dict[str, InARow[str, Entry]] = {}

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        rates = learning_rates(table)
        if rates:
            path = min(rates)
            optimizer = path.rpartition(".groups[")[0]
            row = self._in_a_row.setdefault(optimizer, InARow(self.limit("least_steps")))
            entry = table[Key("optimizer", "", path, "lr", 0, 0)]
            row.see({} if any(rates.values()) else {path: entry.without_parts()}, step=step)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for row in self._in_a_row.values():
            for _, entry, first, num_steps in row:
                message = (
                    f"The learning rate is 0 in {num_steps} steps in a row, from step {first} on: nothing is learned. "
                    "Look at the schedule: does it end before the training, and does anything step it?"
                )
                evidence = {"num_steps": num_steps}
                yield finding_at(entry, step=first, kind="zero-learning-rate", message=message, evidence=evidence)
