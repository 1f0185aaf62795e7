"""Only the optimizer changes parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from traindiff.analyse.findings import Finding, between_steps, listed_text, ranks_text
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.placed_parts import ranks_of
from traindiff.analyse.merge.site import MergedSite, StepTable, finding_at, only_rank, ranks_in
from traindiff.analyse.rules.rule import Rule
from traindiff.core.observation import EDITED, FLIPPED
from traindiff.core.summary import UNIT_ROUNDOFF, distance, norm

_ROUNDINGS = 2.0
"""Roundings of all elements that moving weights away and back leaves: one each way."""


class OptimizersAloneChangeParameters(Rule):
    """Parameters changed between two steps, after one step of the optimizer and before the next forward pass.

    With `observe="witness"`, the same is known of the optimizer's state, until the next step. Some trainings do this on
    purpose: they clip weights, load other weights, or replace them by averages, as schedule-free optimizers do for an
    evaluation. So the rule only warns. If weights were moved and moved back, rounding is left: changes of up to two
    roundings are no finding, of all elements together or of one that alone is another.
    """

    name = "edited"
    finds = "Something else than the optimizer's step changed a parameter, or the optimizer's state, between two steps."
    warns = True
    tells_runs_apart = True

    def begin(self) -> None:
        """Nothing was told so far."""
        self._told: set[tuple[str, str]] = set()
        self._left: dict[tuple[str, str], Any] = {}  # the parameters' summaries after the latest step, by path and slot

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """One finding for all parameters of a step; each parameter is named once."""
        found = [entry for _, entry in sites(table, stage=EDITED) if not self._is_known(table, entry)]
        for key, entry in sites(table, "param", stage=""):
            if not entry.unobserved:
                self._left[key.path, key.slot] = np.array(entry.summary)[()]  # a copy: see GradientsTogether
        for phase in ("param", "optimizer"):
            edited = [entry for entry in found if entry.key.phase == phase]
            fresh = [entry for entry in edited if (entry.key.path, entry.key.slot) not in self._told]
            if fresh:
                self._told.update((entry.key.path, entry.key.slot) for entry in fresh)
                yield _finding(table, fresh, step=step)

    def _is_known(self, table: StepTable, entry: MergedSite) -> bool:
        """True if there is another reason for a change: a bit that flipped (rule `bit-flip`), or rounding."""
        before = self._left.get((entry.key.path, entry.key.slot))
        may_be_one = before is None or np.count_nonzero(before["sketch"] != entry.summary["sketch"]) == 1
        return (entry.key._replace(stage=FLIPPED) in table and may_be_one) or self._is_rounding(entry)

    def _is_rounding(self, entry: MergedSite) -> bool:
        """True if a parameter is as the latest step left it but for rounding; False if that is not known."""
        key = entry.key
        before, u = self._left.get((key.path, key.slot)), UNIT_ROUNDOFF.get(entry.dtype, 0.0)
        if key.phase != "param" or before is None or entry.unobserved:
            return False
        change = distance(before, entry.summary)
        if np.count_nonzero(before["sketch"] != entry.summary["sketch"]) == 1:  # one element: perhaps a bit has flipped
            largest = max(abs(float(before["minimum"])), abs(float(before["maximum"])))
            return bool(change <= _ROUNDINGS * u * largest)
        return bool(change <= _ROUNDINGS * u * norm(before))


def _finding(table: StepTable, fresh: Sequence[MergedSite], *, step: int) -> Finding:
    """The finding about parameters, or about state, that changed before a step."""
    is_state = fresh[0].key.phase == "optimizer"
    names = [f"{one.key.slot} of {one.key.path}" if is_state else one.key.path for one in fresh]
    ranks = sorted(ranks_of(fresh[0].parts))
    others = ranks_in(table) - set(ranks)
    where = f" on {ranks_text(ranks, capital=False)}" if others else ""
    said = listed_text(names, "tensor" if is_state else "parameter")
    return finding_at(
        fresh[0], step=step, kind="edited", rank=only_rank(fresh[0]),
        evidence={"paths": [one.key.path for one in fresh]},
        message=f"{said} changed{where} {between_steps(step)}, not by the optimizer's step.",
    )  # fmt: skip
