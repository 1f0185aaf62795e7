"""Gradients are cleared between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from traindiff.analyse.findings import Finding, more_text
from traindiff.analyse.merge.site import MergedSite, StepTable
from traindiff.analyse.rules.rule import Rule
from traindiff.core.observation import CARRIED

_MOST_NAMED = 3


class GradientsAreCleared(Rule):
    """An optimizer reads gradients that still hold what its step before read, because nothing cleared them.

    The recording knows it from the gradients' counters of writes, and needs no numbers: under a loss scaler, what is
    left over has been unscaled, and may be too small to be seen beside the next gradient. A training that scales
    gradients down between two steps, in place of clearing them, has written to them, and is not flagged.
    """

    name = "carried-gradient"
    finds = "The gradients that a step used were not cleared before the next backward pass."
    tells_runs_apart = True

    def begin(self) -> None:
        """Nothing was told so far."""
        self._told: set[str] = set()

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """One finding for the parameters of a step to which a backward pass added, and one for those that stayed."""
        carried = [one for key, one in table.items() if key[:2] == ("grad", CARRIED) and not one.unobserved]
        fresh = [one for one in carried if one.key.path not in self._told]
        self._told.update(one.key.path for one in fresh)
        total = sum(key[:2] == ("grad", "") and key.slot == "grad" for key in table)
        for added in (True, False):
            if found := [one for one in fresh if bool(one.summary["maximum"]) is added]:
                message = _message(found, total=total, step=step, added=added)
                yield self.finding(found[0], message, step=step, paths=[one.key.path for one in found], added=added)


def _message(found: Sequence[MergedSite], *, total: int, step: int, added: bool) -> str:
    named = ", ".join(one.key.path for one in found[:_MOST_NAMED])
    whose = f"{named}{more_text(len(found) - _MOST_NAMED, 'parameter')}, {len(found)} of {total} gradients"
    if added:
        return (
            f"The backward pass of step {step} added to gradients that step {step - 1} had used, because nothing had "
            f"cleared them ({whose}). Was zero_grad() left out?"
        )
    return (
        f"Step {step} used the gradients of step {step - 1} once more: nothing cleared them, and no backward pass "
        f"added to them ({whose}). Was zero_grad() left out?"
    )
