"""Learning rates that never change although there is a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.rule import Limit, Rule
from traindiff.summary import number

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
        "least_steps": Limit(default=200, says="steps that a run must have; schedules by epoch wait for long"),
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
            says = (
                f"The learning rate of {path} is {rate.value:g} in all of {rate.num_steps} steps, although a scheduler "
                "was made for it. Does anything call scheduler.step()?"
            )
            evidence = {"learning_rate": rate.value, "num_steps": rate.num_steps}
            yield finding_at(rate.entry, step=rate.first, kind="unchanged-learning-rate", says=says, evidence=evidence)
