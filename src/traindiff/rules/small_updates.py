"""Updates that are too small to change anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rounding import UNIT_ROUNDOFF
from traindiff.rules.in_a_row import InARow
from traindiff.rules.rule import Limit, Rule
from traindiff.rules.stepping import learning_rates, moves_parameters
from traindiff.rules.weight_updates import weight_updates
from traindiff.summary import norm


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
        "ratio": Limit(default=1e-7, says="smallest norm of an update, as a share of the weight's norm"),
        "least_steps": Limit(default=20, says="steps in a row in which it must be so; warm-ups begin small"),
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
            says = (
                f"Steps move half of all weights {how}, in {num_steps} steps in a row: usual is about 0.001. Look at "
                f"the learning rate, and whether gradients are divided once too often{lost}."
            )
            evidence = {"ratio": ratio, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="small-updates", says=says, evidence=evidence)
