"""Right updates that rounding to a short dtype takes away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.site import StepTable
from traindiff.analyse.rules.replay import LIMIT, LOST_SHARE, Replayed, replayed
from traindiff.analyse.rules.rule import Contents, Limit, Rule
from traindiff.core.observation import REPLAYED
from traindiff.core.summary import UNIT_ROUNDOFF, distance, norm_of

SHORT = UNIT_ROUNDOFF["float16"]
"""Unit roundoff from which a dtype loses updates that matter. Longer dtypes only lose gradients that are
mathematically zero: those of a bias before batch normalization."""

PATIENCE = 2.0**-10
"""Lost updates matter if a thousand of them would move a parameter by one rounding."""

OTHER = 0.5
"""Relative difference from which two updates are not the same one that only one run loses."""


class UpdatesSurviveRounding(Rule):
    """An optimizer updates parameters in bfloat16 or float16 by so little that rounding takes the updates away.

    The optimizer is right, and such a training may be meant: so the rule only warns. Elements that do not move in one
    step may move in another. Where the share stays high, the parameter hardly trains. Float32 master weights,
    stochastic rounding or a higher learning rate change that.
    """

    name = "lost-update"
    finds = "Updates are smaller than the rounding of a short dtype, and are lost."
    needs = "parameters in bfloat16 or float16"
    warns = True
    tells_runs_apart = True
    judges_sizes = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "lost_share": Limit(
            default=LOST_SHARE,
            message="share of the elements of a parameter that should move and do not, above which updates are lost",
        ),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return any(UNIT_ROUNDOFF.get(entry.dtype, 0.0) >= SHORT for _, entry in sites(contents.table, "param"))

    def step(self, table: StepTable, *, step: int) -> list[Finding]:
        """Findings of a step."""
        share = self.limit("lost_share") / self.strictness
        lost = [one for one in replayed(table) if one.worst <= LIMIT and _is_lost(one, share)]
        return sorted((_lost(one, step=step) for one in lost), key=lambda finding: finding.order)


def is_another_update(finding: Finding, tables: tuple[StepTable, StepTable], common: tuple[Rename, Rename]) -> bool:
    """True if an update is lost in one run because the other run computes another one.

    Then that follows from the gradients, which are judged by themselves. Where these are mathematically zero, both
    updates are noise of any size.

    Args:
        finding: The finding of the first table.
        tables: The step in the run of the finding, then in the other one.
        common: By run, what turns its paths into those that both have in common.
    """
    own, other = (
        [one for one in replayed(table) if rename(one.key.path) == common[0](finding.path)]
        for table, rename in zip(tables, common, strict=True)
    )
    if len(own) != len(other):
        return False
    return any(_apart(one, another) > OTHER for one, another in zip(own, other, strict=True))


def _apart(one: Replayed, other: Replayed) -> float:
    size = max(norm_of(one.value.summary), norm_of(other.value.summary))
    return float(distance(one.value.summary, other.value.summary)) / size if size else 0.0


def _is_lost(one: Replayed, share: float) -> bool:
    """True if rounding loses most of a right update that would have mattered."""
    u, size = UNIT_ROUNDOFF.get(one.dtype, 0.0), norm_of(one.value.summary)
    stored = norm_of(one.rounding.summary)  # at least u times the parameter
    return u >= SHORT and one.lost_share > share and size > PATIENCE * stored


def _lost(one: Replayed, *, step: int) -> Finding:
    """The finding for right updates that rounding loses."""
    share = one.lost_share
    message = (
        f"{share:.0%} of the elements of {one.key.path} do not move, although {one.optimizer} computes an update for "
        f"them: it is smaller than half the spacing of {one.dtype or 'its dtype'} at their size, and is rounded away."
    )
    return Finding(
        step=step, phase="update", stage=REPLAYED, path=one.key.path, slot="update", order=one.order,
        kind="lost-update", difference=share, floor=LOST_SHARE, message=message,
        evidence={"share": share, "dtype": one.dtype},
    )  # fmt: skip
