"""Second moments of Adam that are 0 where the gradient is not: its square is below what the dtype holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.in_a_row import InARow
from traindiff.rules.rule import Limit, Rule
from traindiff.rules.second_moments import moments_of

_ALL = "all"


class SecondMomentsHold(Rule):
    """A part of all elements whose first moment is not 0 and whose second moment is 0, or subnormal.

    Adam divides by the root of the second moment. Where the square of a gradient is lost (below 1e-23 of it in float32,
    below 2e-4 in float16), what is left to divide by is eps, and the update is as large as lr x gradient / eps. Single
    parameters may have gradients that are mathematically 0, so elements of all parameters are counted together.
    """

    name = "zero-second-moment"
    finds = "Adam's second moments are 0 where gradients are not."
    kinds = ("zero-second-moment",)
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.1, says="largest share of all elements with a first moment"),
        "least_steps": Limit(default=5, says="steps in a row in which it must be so"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: InARow[str, tuple[Entry, float]] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        moving = lost = most = 0
        worst: Entry | None = None
        for one in moments_of(table):
            resting = int(one.first.summary["zero"])
            degenerate = int(one.second.summary["zero"]) + int(one.second.summary["subnormal"])
            own = max(0, degenerate - resting)
            moving += one.count - resting
            lost += own
            if own > most:
                most, worst = own, one.second
        if moving:
            found = {}
            if worst is not None and lost > self.limit("share") * moving:
                found[_ALL] = (worst.without_parts(), lost / moving)
            self._in_a_row.see(found, step=step)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for _, (entry, share), first, num_steps in self._in_a_row:
            says = (
                f"{share:.0%} of all elements have a gradient whose square is lost: their second moment is 0 or "
                f"subnormal in {entry.dtype}, most of them in {entry.key.path}, in {num_steps} steps. Adam then "
                "divides by eps alone. Keep its state in float32, or scale the loss up."
            )
            evidence = {"share": share, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="zero-second-moment", says=says, evidence=evidence)
