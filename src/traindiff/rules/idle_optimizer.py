"""Optimizers that step without a single gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.observation import NO_GRADIENT
from traindiff.rules.in_a_row import InARow
from traindiff.rules.rule import Limit, Rule
from traindiff.rules.stepping import learning_rates


class OptimizersHaveGradients(Rule):
    """Steps in a row in which none of the parameters that an optimizer holds has a gradient: nothing moves.

    `zero_grad` between `backward` and `step` does that, or a loss that does not depend on what the optimizer holds. A
    gradient of zeros is one: a loss may be satisfied with every sample.
    """

    name = "idle-optimizer"
    finds = "An optimizer steps, and none of its parameters has a gradient, step after step."
    kinds = ("idle-optimizer",)
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=10, says="steps in a row in which it must be so"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: dict[str, InARow[str, tuple[Entry, int]]] = {}

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        gradients = [entry for key, entry in table.items() if key[:2] == ("grad", "")]
        if gradients:
            optimizer = min(learning_rates(table), default="optimizer").rpartition(".groups[")[0]
            row = self._in_a_row.setdefault(optimizer, InARow(self.limit("least_steps")))
            idle = all(entry.unobserved.startswith(NO_GRADIENT) for entry in gradients)
            row.see({optimizer: (gradients[0].without_parts(), len(gradients))} if idle else {}, step=step)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for row in self._in_a_row.values():
            for optimizer, (entry, count), first, num_steps in row:
                says = (
                    f"{optimizer or 'The optimizer'} steps {num_steps} times in a row, from step {first} on, and none "
                    f"of its {count} parameters has a gradient: nothing is learned. Look for zero_grad() between "
                    "backward() and step(), and whether the loss depends on these parameters."
                )
                evidence = {"num_steps": num_steps, "num_parameters": count}
                yield finding_at(entry, step=first, kind="idle-optimizer", says=says, evidence=evidence)
