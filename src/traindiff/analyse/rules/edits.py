"""Only the optimizer changes parameters."""

from __future__ import annotations

from collections.abc import Iterator

from traindiff.analyse.findings import Finding, more_text, ranks_text
from traindiff.analyse.merge.site import StepTable, finding_at, only_rank
from traindiff.analyse.rules.rule import Rule
from traindiff.core.observation import EDITED

_MOST_NAMED = 3


class OptimizersAloneChangeParameters(Rule):
    """Parameters changed between two steps, after one step of the optimizer and before the next forward pass.

    Some trainings do this on purpose: they clip weights, load other weights, or replace them by averages. So the rule
    only warns.
    """

    name = "edited"
    finds = "Something else than the optimizer changed a parameter between two steps."
    warns = True
    tells_runs_apart = True

    def begin(self) -> None:
        """Nothing was told so far."""
        self._told: set[str] = set()

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """One finding for all parameters of a step; each parameter is named once."""
        edited = [entry for key, entry in table.items() if key[:2] == ("param", EDITED)]
        fresh = [entry for entry in edited if entry.key.path not in self._told]
        if not fresh:
            return
        self._told.update(entry.key.path for entry in fresh)
        ranks = sorted({part.rank for part in fresh[0].parts})
        others = {part.rank for entry in table.values() for part in entry.parts} - set(ranks)
        where = f" on {ranks_text(ranks, capital=False)}" if others else ""
        paths = [entry.key.path for entry in fresh]
        names = ", ".join(paths[:_MOST_NAMED]) + more_text(len(paths) - _MOST_NAMED, "parameter")
        yield finding_at(
            fresh[0], step=step, kind="edited", rank=only_rank(fresh[0]), evidence={"paths": paths},
            message=f"{names} changed{where} between step {step - 1} and step {step}, not by the optimizer.",
        )  # fmt: skip
