"""Gradients that vanish on their way back through the layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.in_a_row import InARow
from traindiff.rules.rule import Limit, Rule
from traindiff.rules.stepping import moves_parameters
from traindiff.rules.weight_gradients import WeightGradient, weight_gradients


class GradientsReachEveryLayer(Rule):
    """Weights whose gradients are many orders of magnitude smaller than those of the layer that gets most.

    What is compared is the root mean square of a gradient's elements. In the trainings on which the limit was tried
    (GPT, MLP, convolutions with batch normalisation) the smallest is 0.005 of the largest; layers whose output is
    scaled by 1e-6 at first, as some are on purpose, begin with a millionth, and the limit is a thousandth of that.
    Behind twelve sigmoids it is 7e-11 (Hochreiter, 1991; Glorot and Bengio, 2010). Gradients that are exactly 0, as
    those behind a head of zeros are in the first step, are another rule's (`no-gradient`).
    """

    name = "vanishing-gradients"
    finds = "The gradient of a layer is many orders of magnitude smaller than that of the layer that gets most."
    kinds = ("vanishing-gradients",)
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "ratio": Limit(default=1e-9, says="smallest part of the largest layer's gradient"),
        "least_steps": Limit(default=10, says="steps in a row in which it must be so; heads of zeros wake up sooner"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: InARow[str, tuple[Entry, float, WeightGradient]] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        gradients = weight_gradients(table) if moves_parameters(table) else []
        if gradients:
            most = max(gradients, key=lambda one: one.size)
            limit = self.limit("ratio") * most.size
            found = {one.path: (one.entry.without_parts(), one.size, most) for one in gradients if one.size < limit}
            self._in_a_row.see(found, step=step)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for path, (entry, size, most), first, num_steps in self._in_a_row:
            says = (
                f"The gradient of {path} vanishes: its elements are {size:.2g} (root mean square), and those of "
                f"{most.path} {most.size:.2g}, {most.size / size:.2g} x as much, in {num_steps} steps. Look for "
                "saturated units and for too small an initialisation between the two; residual connections and "
                "normalisation help."
            )
            evidence = {"size": size, "largest": most.size, "largest_at": most.path, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="vanishing-gradients", says=says, evidence=evidence)
