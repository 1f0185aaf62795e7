"""Adam whose eps is larger than what it is added to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.in_a_row import InARow
from traindiff.rules.rule import Limit, Rule
from traindiff.rules.second_moments import moments_of
from traindiff.summary import largest, number


class EpsIsSmall(Rule):
    """Parameters whose largest root of the second moment is below eps, where they are most of a model.

    Then Adam is gradient descent with the learning rate lr / eps. Biases before a normalisation, and keys of attention,
    have gradients that are 0 but for rounding, and a model that fits its data perfectly has them everywhere; so it is
    asked of more than half of all elements, and is a warning.
    """

    name = "eps-dominates"
    finds = "Adam's eps is larger than the roots of most second moments."
    kinds = ("eps-dominates",)
    warns = True
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.5, says="largest share of all elements that such parameters may have"),
        "least_steps": Limit(default=10, says="steps in a row in which it must be so"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: InARow[str, tuple[Entry, float, float, float]] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        elements = small = most = 0
        worst: tuple[Entry, float, float] | None = None
        for one in moments_of(table):
            eps = self._setting(table, one.path, "eps")
            if eps is None or not float(one.second.summary["maximum"]) > 0.0:
                continue
            size = math.sqrt(float(largest(one.second.summary)) / self._correction(table, one.path))
            elements += one.count
            if size < eps:
                small += one.count
                if one.count > most:
                    most, worst = one.count, (one.second, size, eps)
        if elements:
            found = {}
            if worst is not None and small > self.limit("share") * elements:
                found[""] = (worst[0].without_parts(), *worst[1:], small / elements)
            self._in_a_row.see(found, step=step)
        return ()

    def _setting(self, table: Mapping[Key, Entry], path: str, slot: str) -> float | None:
        """A setting of the first group that holds a parameter."""
        for group in sorted(self.facts.held_in.get(path, ())):
            entry = table.get(Key("optimizer", "", group, slot, 0, 0))
            if entry is not None and not entry.unobserved:
                return number(entry.summary)
        return None

    def _correction(self, table: Mapping[Key, Entry], path: str) -> float:
        """What the second moment is divided by, because it began at 0; 1 where that is not known."""
        beta = self._setting(table, path, "betas[1]")
        steps = table.get(Key("optimizer", "", path, "step", 0, 0))
        if beta is None or steps is None or steps.unobserved or not 0.0 < beta < 1.0:
            return 1.0
        return float(1.0 - beta ** max(1.0, number(steps.summary)))

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for _, (entry, size, eps, share), first, num_steps in self._in_a_row:
            says = (
                f"eps = {eps:g} is larger than the root of every second moment in parameters that hold {share:.0%} of "
                f"all elements, in {num_steps} steps: {entry.key.path} has {size:.2g} at most. Adam then does not "
                "adapt. Use a smaller eps, or look at why gradients are so small."
            )
            evidence = {"eps": eps, "largest_root": size, "share": share, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="eps-dominates", says=says, evidence=evidence)
