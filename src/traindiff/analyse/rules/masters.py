"""Parameters of short dtypes are their master weights, rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.analyse.findings import Finding, listed_text
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, StepTable
from traindiff.analyse.rules.rule import Contents, Limit, Rule
from traindiff.core.observation import BEFORE, MASTER
from traindiff.core.summary import SMALLEST_NORMAL, UNIT_ROUNDOFF, distance, finite_count, norm_of


class MastersAreCopied(Rule):
    """A parameter of a short dtype differs from its float32 master weights by more than rounding explains.

    The optimizer of such a training updates the master weights, and the training copies them into the parameters after
    each step. If it does not, the model computes with old weights. Known are the master weights of DeepSpeed, and those
    in `parameter.main_param`, where Megatron keeps them; a training with copies of its own can put them there, too.
    """

    name = "master-weights"
    finds = "A parameter is not the rounded copy of its float32 master weights."
    needs = "float32 master weights"
    tells_runs_apart = True
    judges_sizes = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "roundings": Limit(
            default=4.0,
            message="smallest difference that is a finding, in roundings of the whole parameter; copies stay below 1",
        ),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return MASTER in contents.slots

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """One finding for all parameters of a step."""
        limit = self.limit("roundings") / self.strictness
        stale: list[tuple[MergedSite, float, float]] = []
        for key, entry in sites(table, "param"):
            if key.slot != MASTER or entry.unobserved:
                continue
            value = table.get(key._replace(slot="value"))
            if value is None or not _are_comparable(value, entry):
                continue
            apart, rounding = float(distance(value.summary, entry.summary)), _rounding(value, entry)
            if apart > limit * rounding:
                stale.append((value, apart, rounding))
        if not stale:
            return
        worst, apart, rounding = stale[0]
        size = norm_of(table[worst.key._replace(slot=MASTER)].summary)
        others = [one.key.path for one, _, _ in stale[1:]]
        also = f" The same is true of {listed_text(others, 'parameter')}." if others else ""
        when = f"when step {step} begins" if worst.key.stage == BEFORE else f"after step {step}"
        message = (
            f"{worst.key.path} is not its master weights rounded to {worst.dtype}, {when}: they are "
            f"{apart / size:.2g} of their norm apart, and rounding explains {rounding / size:.2g}.{also} "
            "Are the master weights copied into the model after each step?"
        )
        yield self.finding(
            worst, message, step=step, paths=[one.key.path for one, _, _ in stale], roundings=apart / rounding
        )


def _are_comparable(value: MergedSite, master: MergedSite) -> bool:
    """True if both are known as a whole, finite, and of dtypes one of which is rounded to the other."""
    summaries = value.summary, master.summary
    if value.unobserved or not (value.placed and master.placed and value.exact and master.exact):
        return False
    if not UNIT_ROUNDOFF.get(value.dtype, 0.0) > UNIT_ROUNDOFF.get(master.dtype, 1.0):
        return False
    counts = {int(one["count"]) for one in summaries} | {int(finite_count(one)) for one in summaries}
    return len(counts) == 1 and value.shape == master.shape


def _rounding(value: MergedSite, master: MergedSite) -> float:
    """The norm of the largest difference that rounding makes; numbers below the normal ones have a fixed spacing."""
    unit = UNIT_ROUNDOFF[value.dtype]
    below = unit * SMALLEST_NORMAL.get(value.dtype, 0.0) * math.sqrt(float(master.summary["count"]))
    return unit * norm_of(master.summary) + below
