"""Steps whose loss or gradient norm jumps far above what it was, and what moved first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from traindiff.findings import Finding
from traindiff.merging.clips import clips
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.losses import loss_of
from traindiff.rules.rule import Limit, Rule
from traindiff.rules.stepping import may_be_left_out
from traindiff.rules.trailing import Trailing
from traindiff.rules.usual_sizes import Moved, UsualSizes
from traindiff.site import label
from traindiff.summary import norm

WINDOW = 32
"""Steps that say what is usual."""

BEGINNING = 5
"""Steps whose largest loss is the one with which a run began."""


class NothingSpikes(Rule):
    """Losses and gradient norms far above those of the steps before.

    Both are held against median and median deviation of the last 32 steps, which the spike itself does not change. A
    spike of the loss also undoes at least half of what the run had gained since it began, and doubles the loss; one of
    the gradient norm is also 10 x the median, and twice as large as any norm before. So the one batch that a nearly
    perfect model gets wrong is no spike. Trainings often recover (Chowdhery et al., PaLM, 2022, section 5.1: about
    20 spikes, skipped over by hand), so it is a warning.

    What moved first is the first tensor in execution order that is 3 x as large as usual, and 6 x as far from it as it
    usually is: an update or a learning rate of the step before, or else something in this step.
    """

    name = "spike"
    finds = "The loss or the gradient norm jumps, with what moved first."
    kinds = ("loss-spike", "gradient-spike")
    warns = True
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "deviations": Limit(default=10.0, says="distance from the median, in deviations; noise stays below 5"),
        "norm_factor": Limit(default=10.0, says="smallest multiple of the median gradient norm that is a spike"),
        "least_steps": Limit(default=16, says="steps that must have passed before anything is called unusual"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._losses, self._norms = Trailing(WINDOW), Trailing(WINDOW)
        self._first_losses: list[float] = []
        self._largest_norm = 0.0
        self._usual = UsualSizes()
        self._done_before: Moved | None = None

    def step(self, table: Mapping[Key, Entry], *, step: int) -> Iterator[Finding]:
        """See the class."""
        computed, done = self._usual.see(table, step=step)
        cause, self._done_before = self._done_before or computed, done
        if (loss := loss_of(table)) is not None:
            yield from self._loss(*loss, cause, step=step)
        if (gradients := _gradient_norm(table)) is not None:
            yield from self._norm(*gradients, cause, step=step)

    def _loss(self, entry: Entry, value: float, cause: Moved | None, *, step: int) -> Iterator[Finding]:
        if len(self._losses) >= self.limit("least_steps"):
            usual, spread = self._losses.median, self._losses.spread
            gained = max(0.0, max(self._first_losses) - usual)
            least = max(abs(usual), 0.5 * gained, self.limit("deviations") * spread)
            if value - usual > least:
                says = (
                    f"The loss jumps to {value:.4g} from a median of {usual:.4g}{_deviations(value - usual, spread)}."
                )
                yield self._finding(
                    entry, kind="loss-spike", says=says, value=value, usual=usual, cause=cause, step=step
                )
        if len(self._first_losses) < BEGINNING:
            self._first_losses.append(value)
        self._losses.add(value)

    def _norm(self, entry: Entry, value: float, cause: Moved | None, *, step: int) -> Iterator[Finding]:
        if len(self._norms) >= self.limit("least_steps"):
            usual, spread = self._norms.median, self._norms.spread
            least = max(
                usual + self.limit("deviations") * spread, self.limit("norm_factor") * usual, 2.0 * self._largest_norm
            )
            if value > least:
                away = _deviations(value - usual, spread)
                says = f"The norm of all gradients jumps to {value:.4g} from a median of {usual:.4g}{away}."
                yield self._finding(
                    entry, kind="gradient-spike", says=says, value=value, usual=usual, cause=cause, step=step
                )
        self._largest_norm = max(self._largest_norm, value)
        self._norms.add(value)

    def _finding(
        self, entry: Entry, *, kind: str, says: str, value: float, usual: float, cause: Moved | None, step: int
    ) -> Finding:
        evidence: dict[str, Any] = {"value": value, "median": usual}
        if cause is None:
            return finding_at(entry, step=step, kind=kind, says=f"{says} No tensor moved before it.", evidence=evidence)
        key = cause.entry.key
        where = f"the learning rate of {key.path}" if key.group else f"{key.phase} {label(key.path, key.slot)}"
        when = "" if cause.step == step else f" in step {cause.step}"
        says += f" What moved first is {where}{when}, {cause.factor:.3g} x as large as usual."
        evidence |= {"moved_first": where, "moved_in_step": cause.step, "moved_factor": cause.factor}
        return finding_at(entry, step=step, kind=kind, says=says, evidence=evidence)


def _deviations(away: float, spread: float) -> str:
    return f", {away / spread:.3g} deviations" if spread else ""


def _gradient_norm(table: Mapping[Key, Entry]) -> tuple[Entry, float] | None:
    """The norm of all gradients before clipping, and where it is; None in steps that a loss scaler leaves out."""
    if may_be_left_out(table):
        return None
    clipped = [(clip.entry, clip.norm) for clip in clips(table) if clip.norm is not None]
    if len(clipped) == 1:
        return clipped[0]
    gradients = [entry for key, entry in table.items() if key[:2] == ("grad", "") and not entry.unobserved]
    if not gradients:
        return None
    whole = math.sqrt(sum(float(entry.summary["sum_of_squares"]) for entry in gradients))
    return max(gradients, key=lambda entry: float(norm(entry.summary))), whole
