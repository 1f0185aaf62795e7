"""Only the optimizer changes parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from traindiff.analyse.findings import Finding, more_text, ranks_text
from traindiff.analyse.merge.site import MergedSite, StepTable, finding_at, only_rank
from traindiff.analyse.rules.rule import Rule
from traindiff.core.observation import EDITED

_MOST_NAMED = 3


class OptimizersAloneChangeParameters(Rule):
    """Parameters changed between two steps, after one step of the optimizer and before the next forward pass.

    With `observe="witness"`, the same is known of the optimizer's state, until the next step. Some trainings do this on
    purpose: they clip weights, load other weights, or replace them by averages. So the rule only warns.
    """

    name = "edited"
    finds = "Something else than the optimizer changed a parameter, or its own state, between two steps."
    warns = True
    tells_runs_apart = True

    def begin(self) -> None:
        """Nothing was told so far."""
        self._told: set[tuple[str, str]] = set()

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """One finding for all parameters of a step; each parameter is named once."""
        for phase in ("param", "optimizer"):
            edited = [entry for key, entry in table.items() if key[:2] == (phase, EDITED)]
            fresh = [entry for entry in edited if (entry.key.path, entry.key.slot) not in self._told]
            if fresh:
                self._told.update((entry.key.path, entry.key.slot) for entry in fresh)
                yield _finding(table, fresh, step=step)


def _finding(table: StepTable, fresh: Sequence[MergedSite], *, step: int) -> Finding:
    """The finding about parameters, or about state, that changed before a step."""
    is_state = fresh[0].key.phase == "optimizer"
    names = [f"{one.key.slot} of {one.key.path}" if is_state else one.key.path for one in fresh]
    ranks = sorted({part.rank for part in fresh[0].parts})
    others = {part.rank for entry in table.values() for part in entry.parts} - set(ranks)
    where = f" on {ranks_text(ranks, capital=False)}" if others else ""
    said = ", ".join(names[:_MOST_NAMED]) + more_text(len(names) - _MOST_NAMED, "tensor" if is_state else "parameter")
    return finding_at(
        fresh[0], step=step, kind="edited", rank=only_rank(fresh[0]),
        evidence={"paths": [one.key.path for one in fresh]},
        message=f"{said} changed{where} between step {step - 1} and step {step}, not by the optimizer.",
    )  # fmt: skip
