"""How far a step moves each weight, relative to its size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.finding_at import finding_at
from traindiff.analyse.merge.step_table import Entry, Key
from traindiff.analyse.rules.gradient_sizes import FEW
from traindiff.analyse.rules.learning_rates import learning_rates, moves_parameters
from traindiff.analyse.rules.rule import InARow, Limit, Rule
from traindiff.core.summary import UNIT_ROUNDOFF, nonfinite_count, norm


def weight_updates(table: Mapping[Key, Entry]) -> Iterator[tuple[Entry, float]]:
    """The update of each weight, and its norm as a share of the weight's norm after it.

    Weights have two axes or more: a bias or a norm may rightly be replaced by its first updates.
    """
    for key, update in table.items():
        if key[:2] != ("update", "") or len(update.shape) < 2 or int(update.summary["count"]) < FEW:
            continue
        parameter = table.get(Key("param", "", key.path, "value", 0, 0))
        if parameter is None or parameter.unobserved or nonfinite_count(parameter.summary):
            continue
        size = float(norm(parameter.summary))
        if size and not nonfinite_count(update.summary):
            yield update, float(norm(update.summary)) / size


class UpdatesAreLargeEnough(Rule):
    """Trainings in which half of all weights move by less than a ten-millionth of their size, step after step.

    Ten million steps in one direction would then replace them; usual is a thousand. A weight of a short dtype that has
    a gradient and a learning rate, and does not move at all, counts: its updates are rounded away. At the ends of a
    warm-up and of a decay it may be so for a while, so it is a warning.
    """

    name = "small-updates"
    finds = "Steps move half of all weights by next to nothing."
    kinds = ("small-updates",)
    warns = True
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "ratio": Limit(default=1e-7, message="smallest norm of an update, as a share of the weight's norm"),
        "least_steps": Limit(default=20, message="steps in a row in which it must be so; warm-ups begin small"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: InARow[str, tuple[Entry, float]] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        moved = list(self._moved(table)) if moves_parameters(table) else []
        if moved:
            middle = median(ratio for _, ratio in moved)
            small = middle < self.limit("ratio")
            self._in_a_row.see({"": (moved[0][0], middle)} if small else {}, step=step)
        return ()

    def _moved(self, table: Mapping[Key, Entry]) -> Iterator[tuple[Entry, float]]:
        """Weights that the step moved, and short ones that it left as they were in spite of a gradient."""
        rates = learning_rates(table)
        for entry, ratio in weight_updates(table):
            path = entry.key.path
            gradient = table.get(Key("grad", "", path, "grad", 0, 0))
            rests = gradient is None or gradient.unobserved or not float(norm(gradient.summary))
            rate = max((rates.get(group, 0.0) for group in self.facts.held_in.get(path, ())), default=0.0)
            short = UNIT_ROUNDOFF.get(entry.dtype, 0.0) >= UNIT_ROUNDOFF["float16"]
            if ratio or (short and rate and not rests):
                yield entry, ratio

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for _, (entry, ratio), first, num_steps in self._in_a_row:
            how = f"by less than {ratio:.2g} of their size" if ratio else "not at all, although they have gradients"
            lost = "" if ratio else f"; {entry.dtype} rounds their updates away"
            message = (
                f"Steps move half of all weights {how}, in {num_steps} steps in a row: usual is about 0.001. Look at "
                f"the learning rate, and whether gradients are divided once too often{lost}."
            )
            evidence = {"ratio": ratio, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="small-updates", message=message, evidence=evidence)


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
        "ratio": Limit(default=0.5, message="largest norm of an update, as a share of the weight's norm after it"),
        "least_steps": Limit(
            default=10, message="steps in a row in which it must be so; the first ones may be that large"
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
            message = (
                f"Updates of {path} are as large as itself: {ratio:.2g} x its norm, and more than "
                f"{self.limit('ratio'):g} x in {num_steps} steps in a row. Usual is about 0.001: lower the learning "
                "rate."
            )
            evidence = {"ratio": ratio, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="large-updates", message=message, evidence=evidence)
