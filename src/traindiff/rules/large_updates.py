"""Updates that replace what they should improve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.in_a_row import InARow
from traindiff.rules.rule import Limit, Rule
from traindiff.rules.stepping import moves_parameters
from traindiff.rules.weight_updates import weight_updates


class UpdatesAreSmall(Rule):
    """Weights that steps move by a large part of their own norm, again and again.

    Usual is about 1e-3; in the healthy trainings on which the limit was tried, the largest of a single step after the
    tenth is 0.1, and 0.5 with sigmoids and a learning rate of 0.5. A weight that begins at 0 is replaced by its first
    update, halved by the second, and so on; where updates point in random directions the tenth is still 0.32 of what
    the weight has become. So half of it, ten times in a row, is a weight that has forgotten what it had learned.
    """

    name = "large-updates"
    finds = "Steps move a weight by a large part of its size, again and again."
    kinds = ("large-updates",)
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "ratio": Limit(default=0.5, says="largest norm of an update, as a share of the weight's norm after it"),
        "least_steps": Limit(
            default=10, says="steps in a row in which it must be so; the first ones may be that large"
        ),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: InARow[str, tuple[Entry, float]] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        limit = self.limit("ratio")
        if moves_parameters(table):
            found = {entry.key.path: (entry, ratio) for entry, ratio in weight_updates(table) if ratio > limit}
            self._in_a_row.see(found, step=step)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for path, (entry, ratio), first, num_steps in self._in_a_row:
            says = (
                f"Updates of {path} are as large as itself: {ratio:.2g} x its norm, and more than "
                f"{self.limit('ratio'):g} x in {num_steps} steps in a row. Usual is about 0.001: lower the learning "
                "rate."
            )
            evidence = {"ratio": ratio, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="large-updates", says=says, evidence=evidence)
