"""A gradient keeps its bits from the backward pass until something reads it."""

from __future__ import annotations

from collections.abc import Iterator

from traindiff.analyse.findings import Finding, ranks_text
from traindiff.analyse.merge.site import StepTable, finding_at, only_rank
from traindiff.analyse.rules.rule import Rule
from traindiff.core.observation import FLIPPED
from traindiff.core.summary import number


class GradientsKeepTheirBits(Rule):
    """One bit of one element of a gradient changed in memory, after a backward pass, and nothing wrote to it.

    Needs `observe="witness"`, and a gradient on the CPU with at least 16 elements that are not 0. Each gradient is
    marked after each backward pass, and looked at before something else adds to it, reads or changes it. torch counts
    writes, except those through `.data`; these change more than one bit, and a training that makes them is no longer
    looked at.
    """

    name = "bit-flip"
    finds = "One bit of a gradient changed in memory between the backward pass and the optimizer's step."
    tells_runs_apart = True

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step: one for each gradient."""
        ranks = {part.rank for entry in table.values() for part in entry.parts}
        for key, entry in table.items():
            if key[:2] != ("grad", FLIPPED) or entry.unobserved or not entry.parts:
                continue
            mine = {part.rank for part in entry.parts}
            where = f" on {ranks_text(sorted(mine), capital=False)}" if mine != ranks else ""
            bit = int(number(entry.parts[0].summary))
            yield finding_at(
                entry, step=step, kind=self.name, rank=only_rank(entry) if where else None,
                micro_step=entry.parts[0].micro_step,
                message=f"Bit {bit} of one element of the gradient changed in memory{where}, after the backward pass "
                "and before anything read the gradient. Nothing wrote to it: is the hardware sound?",
                evidence={"bit": bit},
            )  # fmt: skip
