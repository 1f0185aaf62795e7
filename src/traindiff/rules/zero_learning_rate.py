"""Learning rates that stay 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.in_a_row import InARow
from traindiff.rules.rule import Limit, Rule
from traindiff.rules.stepping import learning_rates


class LearningRateIsSet(Rule):
    """Steps in a row in which the learning rates of all groups of an optimizer are 0: nothing moves.

    A warm-up begins at 0 for one step, and a decay may end there. Single groups may rest at 0.
    """

    name = "zero-learning-rate"
    finds = "All learning rates are 0, step after step."
    kinds = ("zero-learning-rate",)
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=10, says="steps in a row in which it must be so; warm-ups begin with one"),
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
                says = (
                    f"The learning rate is 0 in {num_steps} steps in a row, from step {first} on: nothing is learned. "
                    "Look at the schedule: does it end before the training, and does anything step it?"
                )
                evidence = {"num_steps": num_steps}
                yield finding_at(entry, step=first, kind="zero-learning-rate", says=says, evidence=evidence)
