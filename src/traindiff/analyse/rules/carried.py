"""Gradients are cleared between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from traindiff.analyse.findings import Finding, listed_text, micro_steps_text
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.recorded_calls import num_cleared
from traindiff.analyse.merge.site import StepTable, num_micro_steps
from traindiff.analyse.rules.rule import Rule
from traindiff.core.observation import CARRIED


class GradientsAreCleared(Rule):
    """An optimizer reads gradients that still hold what its step before read, because nothing cleared them.

    The recording knows it from the gradients' counters of writes, and needs no numbers: under a loss scaler, what is
    left over has been unscaled, and may be too small to be seen beside the next gradient. A training that scales
    gradients down between two steps, in place of clearing them, has written to them, and is not flagged. Nor is a
    closure (LBFGS) that writes to them after its backward pass: it may take away what is left over.
    """

    name = "carried-gradient"
    finds = "The gradients that a step used were not cleared before the next backward pass."
    tells_runs_apart = True

    def begin(self) -> None:
        """Nothing was told so far."""
        self._told: set[str] = set()
        self._too_early: tuple[int, int, int] = (0, 0, 0)  # the first step, the micro-steps cleared in it, and all
        self._num_steps = [0, 0]  # with gradients that were cleared too early, and all

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """One finding for all parameters of a step; each parameter is named once."""
        carried = [one for _, one in sites(table, "grad", stage=CARRIED) if not one.unobserved]
        fresh = [one for one in carried if one.key.path not in self._told]
        self._told.update(one.key.path for one in fresh)
        total = sum(key.slot == "grad" for key, _ in sites(table, "grad", stage=""))
        if fresh:
            paths = [one.key.path for one in fresh]
            yield self.finding(fresh[0], _message(paths, total=total, step=step), step=step, paths=paths)
        cleared = num_cleared(table)
        if cleared and not self._num_steps[0]:
            self._too_early = step, cleared, num_micro_steps(table)
        self._num_steps[0] += bool(cleared)
        self._num_steps[1] += 1

    def notes(self) -> Iterator[str]:
        """Steps in which the gradients of some micro-steps were cleared unread: that may be meant."""
        step, cleared, total = self._too_early
        if cleared:
            which = micro_steps_text(range(cleared))
            yield (
                f"In {self._num_steps[0]} of {self._num_steps[1]} steps, first in step {step}, the gradients of "
                f"{which} of {total} were cleared before a step read them. If they are to be accumulated, zero_grad() "
                "is called too often."
            )


def _message(paths: Sequence[str], *, total: int, step: int) -> str:
    named = listed_text(paths, "parameter")
    return (
        f"The backward pass of step {step} added to gradients that step {step - 1} had used, because nothing had "
        f"cleared them ({named}, {len(paths)} of {total} gradients). Was zero_grad() left out?"
    )
