"""Gradients that their dtype is about to lose: most of their elements are subnormal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.in_a_row import InARow
from traindiff.rules.rule import Limit, Rule
from traindiff.site import label
from traindiff.summary import finite_count

FEW = 64
"""Elements that are not zero below which a share says little."""


class FarFromUnderflow(Rule):
    """Gradients of which most elements that are not zero are subnormal in their own dtype.

    Subnormal numbers have fewer digits the smaller they are (in float16 below 6e-5, the last one is 6e-8), and what is
    smaller still is 0. Loss scaling is there to prevent it (Micikevicius et al., Mixed Precision Training, 2018). A
    tail of small elements is as it should be; half of a tensor is not.
    """

    name = "underflow"
    finds = "Most elements of a gradient are subnormal in its dtype: smaller ones become 0."
    kinds = ("underflow",)
    warns = True
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.5, says="share of the elements that are not zero that may be subnormal"),
        "least_steps": Limit(default=3, says="steps in a row in which it must be so; one batch may have no gradient"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: InARow[Key, tuple[Entry, float]] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        found = {}
        for key, entry in table.items():
            if key.phase not in ("backward", "grad") or key.stage or entry.unobserved or not entry.exact:
                continue
            subnormal = int(entry.summary["subnormal"])
            if not subnormal:
                continue
            present = int(finite_count(entry.summary)) - int(entry.summary["zero"])
            if present >= FEW and subnormal > self.limit("share") * present:
                found[key] = (entry.without_parts(), subnormal / present)
        self._in_a_row.see(found, step=step)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for key, (entry, share), first, num_steps in self._in_a_row:
            says = (
                f"{share:.0%} of the elements of the gradient of {label(key.path, key.slot)} that are not zero are "
                f"subnormal in {entry.dtype}, in {num_steps} steps: smaller ones are lost. Use a loss scale "
                "(GradScaler), a larger one, or bfloat16."
            )
            evidence = {"share": share, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="underflow", says=says, evidence=evidence)
