"""Batches whose samples hold one number each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.observation import SAMPLE
from traindiff.rounding import UNIT_ROUNDOFF
from traindiff.rules.in_a_row import InARow
from traindiff.rules.rule import Limit, Rule

FEW = 16
"""Elements below which a sample may well be constant."""


class SamplesVary(Rule):
    """Batches most of whose samples are constant, in every input of fractions: an image of one colour, features of 0.

    Whole numbers (tokens, masks, labels) may be constant, and so may masks of fractions beside an input that varies.
    Black frames and silence exist, so it is a warning.
    """

    name = "constant-batch"
    finds = "Most samples of a batch hold one number each."
    kinds = ("constant-batch",)
    warns = True
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.5, says="largest share of a batch's samples that may be constant"),
        "least_steps": Limit(default=3, says="steps in a row in which it must be so"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: InARow[str, tuple[Entry, float, float]] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        shares: dict[str, list[bool]] = {}
        for key, entry in table.items():
            if key[:3] != ("batch", SAMPLE, "") or entry.dtype not in UNIT_ROUNDOFF or "mask" in key.slot:
                continue
            for part in entry.parts:
                if int(part.summary["count"]) >= FEW:
                    constant = float(part.summary["minimum"]) == float(part.summary["maximum"])
                    shares.setdefault(key.slot, []).append(constant)
        if shares:
            share = min(sum(found) / len(found) for found in shares.values())
            entry = next(
                one for key, one in table.items() if key[:3] == ("batch", SAMPLE, "") and key.slot == next(iter(shares))
            )
            found = {}
            if share > self.limit("share"):
                found[""] = (entry.without_parts(), share, float(entry.summary["maximum"]))
            self._in_a_row.see(found, step=step)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for _, (entry, share, value), first, num_steps in self._in_a_row:
            says = (
                f"{share:.0%} of the samples of {entry.key.slot} are constant (the first is {value:g} throughout), in "
                f"{num_steps} steps in a row. Look at how samples are read, and at their normalisation."
            )
            evidence = {"share": share, "value": value, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="constant-batch", says=says, evidence=evidence)
