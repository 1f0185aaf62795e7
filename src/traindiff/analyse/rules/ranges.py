"""Tensors near the ends of what their dtype holds, and loss scales that cannot prevent it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.site import MergedSite, StepTable, is_loss_scale
from traindiff.analyse.rules.learning_rates import has_loss_scale, is_left_out
from traindiff.analyse.rules.rule import Found, Limit, Repeated, RepeatedRule, Rule
from traindiff.core.site import label
from traindiff.core.summary import LARGEST, finite_count, nonfinite_count, number


class LossScaleSettles(Rule):
    """A loss scaler leaves out steps although its scale is 1 or less, or it leaves out too many steps.

    A scaler that begins at 65536 may rightly leave out some of the first steps, halving its scale each time, and then
    one in 2000, to find out how far it can go. At a scale of 1 gradients overflow by themselves, and a smaller scale
    only loses their small elements. 20 of 40 steps are more than the 16 that it takes to come from 65536 to 1.
    """

    name = "skipped-steps"
    finds = "A loss scaler leaves out most steps, or overflows with a scale of 1 or less."
    kinds = ("skipped-steps", "loss-scale-floor")
    limits: ClassVar[Mapping[str, Limit]] = {
        "floor": Limit(default=1.0, message="scale at which no step may be left out any more"),
        "most": Limit(default=20, message="steps that may be left out in a window"),
        "window": Limit(default=40, message="steps in that window"),
    }

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._left_out: deque[bool] = deque(maxlen=max(1, int(self.limit("window"))))
        self._told = False

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        scales = [entry for key, entry in table.items() if is_loss_scale(key) and not entry.unobserved]
        left_out = is_left_out(table)
        self._left_out.append(left_out)
        if not left_out or not scales:
            return
        scale = number(scales[0].summary)
        where = _first_overflow(table) or scales[0]
        if scale <= self.limit("floor"):
            message = (
                f"Step {step} is left out although the loss scale is down to {scale:g}: the gradients overflow by "
                f"themselves, first that of {where.key.path}. Look there for what is infinite or NaN; no scale helps."
            )
            yield self.finding(where, message, step=step, kind="loss-scale-floor", scale=scale)
        count = sum(self._left_out)
        if count > self.limit("most") and not self._told:
            self._told = True
            message = (
                f"{count} of the last {len(self._left_out)} steps are left out by the loss scaler, whose scale is "
                f"{scale:g}: the parameters hardly move. The first gradient that is not finite is that of "
                f"{where.key.path}."
            )
            yield self.finding(where, message, step=step, left_out=count, of=len(self._left_out), scale=scale)


def _first_overflow(table: StepTable) -> MergedSite | None:
    """The first gradient in execution order that is not finite."""
    return next(
        (
            entry
            for key, entry in table.items()
            if key.phase in ("backward", "grad") and not entry.unobserved and nonfinite_count(entry.summary)
        ),
        None,
    )


FILLED = 0.999
"""A value from this share of the largest number on counts as the fill value of a mask (`finfo.min`)."""

_ALWAYS = frozenset({"forward", "param"})
_UNSCALED = frozenset({"backward", "grad"})


class FarFromOverflow(Rule):
    """Activations, gradients or parameters are within a factor of the largest finite number of their dtype.

    In float16, which ends at 65504, activations of a healthy transformer are below about 1000; those within a factor of
    4 of its end leave two doublings. Gradients that are multiplied by a loss scale are left out: a scaler raises it
    until they overflow. So are elements that equal the largest number itself, with which masks are filled.
    """

    name = "near-overflow"
    finds = "A tensor comes near the largest number of its dtype."
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "headroom": Limit(
            default=4.0, message="how many times larger a tensor must be able to become; 4 leaves two doublings"
        ),
    }

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        headroom = self.limit("headroom")
        phases = _ALWAYS if has_loss_scale(table) else _ALWAYS | _UNSCALED
        for key, entry in table.items():
            if key.phase not in phases or entry.unobserved:
                continue
            end = LARGEST.get(entry.dtype)
            if end is None or nonfinite_count(entry.summary):
                continue  # another rule finds overflows
            ends = (-float(entry.summary["minimum"]), float(entry.summary["maximum"]))
            size = entry.factor * max((one for one in ends if one < FILLED * end), default=0.0)
            if size * headroom < end:
                continue
            message = (
                f"{label(key.path, key.slot)} reaches {size:.3g}, and {entry.dtype} ends at {end:.5g}: "
                f"{end / size:.2g} x as much is infinite. Use bfloat16 or float32 here, or find what makes it so large."
            )
            yield self.finding(entry, message, step=step, largest=size, end=end)


FEW = 64
"""Nonzero elements below which a share says little."""


class FarFromUnderflow(RepeatedRule):
    """Most nonzero elements of a gradient are subnormal in their own dtype.

    Subnormal numbers have fewer digits the smaller they are (in float16 below 6e-5, down to 6e-8), and smaller numbers
    become 0. Loss scaling prevents it (Micikevicius et al., Mixed Precision Training, 2018). A tail of small elements
    is normal; half of a tensor is not.
    """

    name = "underflow"
    finds = "Most elements of a gradient are subnormal in its dtype: smaller ones become 0."
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.5, message="share of the elements that are not zero that may be subnormal"),
        "least_steps": Limit(
            default=3, message="steps in a row in which it must be so; one batch may have no gradient"
        ),
    }

    def _wrong(self, table: StepTable) -> Found:
        found: Found = {}
        for key, entry in table.items():
            if key.phase not in ("backward", "grad") or key.stage or entry.unobserved or not entry.exact:
                continue
            subnormal = int(entry.summary["subnormal"])
            if not subnormal:
                continue
            present = int(finite_count(entry.summary)) - int(entry.summary["zero"])
            if present >= FEW and subnormal > self.limit("share") * present:
                found[key] = (entry, {"share": subnormal / present})
        return found

    def _message(self, row: Repeated) -> str:
        key = row.site.key
        return (
            f"{row.numbers['share']:.0%} of the elements of the gradient of {label(key.path, key.slot)} that are not "
            f"zero are subnormal in {row.site.dtype}, in {row.num_steps} steps: smaller ones are lost. Use a loss "
            "scale (GradScaler), a larger one, or bfloat16."
        )
