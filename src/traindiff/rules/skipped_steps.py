"""Loss scalers that leave out step after step, or cannot lower their scale any further."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.loss_scale import is_loss_scale
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.rule import Limit, Rule
from traindiff.rules.stepping import is_left_out
from traindiff.summary import nonfinite_count, number


class LossScaleSettles(Rule):
    """Steps that a loss scaler leaves out although its scale is 1 or less, and too many of them.

    A scaler that begins at 65536 may rightly leave out some of the first steps, halving its scale each time, and then
    one in 2000, to find out how far it can go. At a scale of 1 gradients overflow by themselves, and a smaller one only
    loses their small elements. 20 of 40 steps are more than the 16 that it takes to come from 65536 to 1.
    """

    name = "skipped-steps"
    finds = "A loss scaler leaves out most steps, or overflows with a scale of 1 or less."
    kinds = ("skipped-steps", "loss-scale-floor")
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "floor": Limit(default=1.0, says="scale at which no step may be left out any more"),
        "most": Limit(default=20, says="steps that may be left out in a window"),
        "window": Limit(default=40, says="steps in that window"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._left_out: deque[bool] = deque(maxlen=max(1, int(self.limit("window"))))
        self._told = False

    def step(self, table: Mapping[Key, Entry], *, step: int) -> Iterator[Finding]:
        """See the class."""
        scales = [entry for key, entry in table.items() if is_loss_scale(key) and not entry.unobserved]
        left_out = is_left_out(table)
        self._left_out.append(left_out)
        if not left_out or not scales:
            return
        scale = number(scales[0].summary)
        where = _first_overflow(table) or scales[0]
        if scale <= self.limit("floor"):
            says = (
                f"Step {step} is left out although the loss scale is down to {scale:g}: the gradients overflow by "
                f"themselves, first that of {where.key.path}. Look there for what is infinite or NaN; no scale helps."
            )
            evidence = {"scale": scale}
            yield finding_at(where, step=step, kind="loss-scale-floor", says=says, evidence=evidence)
        count = sum(self._left_out)
        if count > self.limit("most") and not self._told:
            self._told = True
            says = (
                f"{count} of the last {len(self._left_out)} steps are left out by the loss scaler, whose scale is "
                f"{scale:g}: the parameters hardly move. The first gradient that is not finite is that of "
                f"{where.key.path}."
            )
            evidence = {"left_out": count, "of": len(self._left_out), "scale": scale}
            yield finding_at(where, step=step, kind="skipped-steps", says=says, evidence=evidence)


def _first_overflow(table: Mapping[Key, Entry]) -> Entry | None:
    """The first gradient in execution order that is not finite."""
    return next(
        (
            entry
            for key, entry in table.items()
            if key.phase in ("backward", "grad") and not entry.unobserved and nonfinite_count(entry.summary)
        ),
        None,
    )
