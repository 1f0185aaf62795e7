"""Gradients that explode on their way back through the layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf, prod
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.clips import clips
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.in_a_row import InARow
from traindiff.rules.rule import Limit, Rule
from traindiff.rules.stepping import moves_parameters
from traindiff.rules.weight_gradients import WeightGradient, weight_gradients
from traindiff.summary import norm


class GradientsStayBounded(Rule):
    """Weights whose gradients are many orders of magnitude larger than those of the layer nearest the loss.

    What is compared is the root mean square of a gradient's elements; the nearest layer is the one whose module returns
    last in the forward pass. In the trainings on which the limit was tried no layer has more than 80 x the last one's;
    recurrent layers whose matrices enlarge what they are given have it grow with every position (Pascanu et al., 2013).
    A last layer may have next to no gradient because its loss counts little, so the gradient of the other must also be
    large by itself: several times as large as the weight, before clipping.
    """

    name = "exploding-gradients"
    finds = "The gradient of a layer is many orders of magnitude larger than that of the layer nearest the loss."
    kinds = ("exploding-gradients",)
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "ratio": Limit(default=1e5, says="largest multiple of the last layer's gradient"),
        "size": Limit(default=10.0, says="norm of the gradient before clipping, as a multiple of the weight's norm"),
        "least_steps": Limit(default=3, says="steps in a row in which it must be so; a run does not survive many"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: InARow[str, tuple[Entry, float, WeightGradient]] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        gradients = weight_gradients(table) if moves_parameters(table) else []
        if gradients and gradients[-1].place >= 0:
            last = gradients[-1]
            limit = self.limit("ratio") * last.size
            found = {
                one.path: (one.entry.without_parts(), one.size, last)
                for one in gradients
                if one.size > limit and _relative(table, one) > self.limit("size")
            }
            self._in_a_row.see(found, step=step)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for path, (entry, size, last), first, num_steps in self._in_a_row:
            says = (
                f"The gradient of {path} explodes: its elements are {size:.2g} (root mean square), "
                f"{size / last.size:.2g} x those of {last.path}, the layer nearest the loss, in {num_steps} steps. Use "
                "a smaller initialisation or normalisation between the two, or shorter sequences; clipping hides it."
            )
            evidence = {"size": size, "last": last.size, "last_at": last.path, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="exploding-gradients", says=says, evidence=evidence)


def _relative(table: Mapping[Key, Entry], gradient: WeightGradient) -> float:
    """Norm of a gradient before it was clipped, as a multiple of the weight's norm; 0 where that is not known."""
    parameter = table.get(Key("param", "", gradient.path, "value", 0, 0))
    if parameter is None or parameter.unobserved:
        return 0.0
    clipped = prod(clip.coefficient for clip in clips(table))
    size = clipped * float(norm(parameter.summary))
    return float(norm(gradient.entry.summary)) / size if size else inf
