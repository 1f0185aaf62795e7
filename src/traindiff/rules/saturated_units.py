"""Layers of Tanh or Sigmoid whose outputs are at their limits, where next to no gradient passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.in_a_row import InARow
from traindiff.rules.rule import Limit, Rule
from traindiff.summary import nonfinite_count

SQUASHING = frozenset({"Tanh", "Sigmoid"})
"""Modules whose derivative follows from their output."""

FEW = 16
"""Outputs below which a mean says little."""


class UnitsAreSensitive(Rule):
    """`Tanh` and `Sigmoid` modules whose mean derivative is next to nothing, step after step.

    The derivative follows from the output, and its mean from the output's sum and sum of squares: 1 - y^2 and
    y (1 - y). At 1 % of the largest derivative, outputs of a Tanh are 0.995 on the average. What the model itself
    returns is passed over: a classifier that is right is saturated. Gates inside it may rightly be, so it is a warning.
    `torch.tanh` and `torch.sigmoid`, gates inside an LSTM, and other activations are not seen.
    """

    name = "saturated-units"
    finds = "A layer of Tanh or Sigmoid is saturated: next to no gradient passes."
    kinds = ("saturated-units",)
    warns = True
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "sensitivity": Limit(default=0.01, says="smallest mean derivative, as a share of the largest there can be"),
        "least_steps": Limit(default=10, says="steps in a row in which it must be so"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: InARow[Key, tuple[Entry, float]] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        returned = {int(entry.summary["fingerprint"]) for key, entry in table.items() if key[:3] == ("forward", "", "")}
        found = {}
        for key, entry in table.items():
            kind = self.facts.modules.get(key.path)
            if key[:2] != ("forward", "") or not key.path or kind not in SQUASHING or entry.unobserved:
                continue
            count = int(entry.summary["count"])
            if count < FEW or nonfinite_count(entry.summary) or int(entry.summary["fingerprint"]) in returned:
                continue
            mean, squares = float(entry.summary["sum"]) / count, float(entry.summary["sum_of_squares"]) / count
            sensitivity = 1.0 - squares if kind == "Tanh" else 4.0 * (mean - squares)
            if sensitivity < self.limit("sensitivity"):
                found[key] = (entry.without_parts(), max(0.0, sensitivity))
        self._in_a_row.see(found, step=step)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for key, (entry, sensitivity), first, num_steps in self._in_a_row:
            says = (
                f"{key.path} ({self.facts.modules[key.path]}) is saturated: its mean derivative is {sensitivity:.2g} "
                f"of the largest there can be, in {num_steps} steps in a row. Look at how large its inputs are: "
                "initialisation, learning rate, or a normalisation before it."
            )
            evidence = {"sensitivity": sensitivity, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="saturated-units", says=says, evidence=evidence)
