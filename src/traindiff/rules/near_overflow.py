"""Tensors that are near the end of what their dtype holds: the next larger batch may overflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rounding import LARGEST
from traindiff.rules.rule import Limit, Rule
from traindiff.rules.stepping import has_loss_scale
from traindiff.site import label
from traindiff.summary import nonfinite_count

FILLED = 0.999
"""From this share of the largest number on, a value is taken for one that masks were filled with (`finfo.min`)."""

_ALWAYS = frozenset({"forward", "param"})
_UNSCALED = frozenset({"backward", "grad"})


class FarFromOverflow(Rule):
    """Activations, gradients and parameters within a factor of the largest finite number of their dtype.

    In float16, which ends at 65504, activations of a healthy transformer are below 1000 or so; those within a factor of
    4 of its end leave two doublings. Gradients that are multiplied by a loss scale are passed over: a scaler raises
    it until they overflow. So are elements that equal the largest number itself, with which masks are filled.
    """

    name = "near-overflow"
    finds = "A tensor comes near the largest number of its dtype."
    kinds = ("near-overflow",)
    warns = True
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "headroom": Limit(
            default=4.0, says="how many times larger a tensor must be able to become; 4 leaves two doublings"
        ),
    }

    def step(self, table: Mapping[Key, Entry], *, step: int) -> Iterator[Finding]:
        """See the class."""
        headroom = self.limit("headroom")
        phases = _ALWAYS if has_loss_scale(table) else _ALWAYS | _UNSCALED
        for key, entry in table.items():
            if key.phase not in phases or entry.unobserved:
                continue
            end = LARGEST.get(entry.dtype)
            if end is None or nonfinite_count(entry.summary):
                continue  # what has overflowed is another rule's
            ends = (-float(entry.summary["minimum"]), float(entry.summary["maximum"]))
            size = entry.factor * max((one for one in ends if one < FILLED * end), default=0.0)
            if size * headroom < end:
                continue
            says = (
                f"{label(key.path, key.slot)} reaches {size:.3g}, and {entry.dtype} ends at {end:.5g}: "
                f"{end / size:.2g} x as much is infinite. Use bfloat16 or float32 here, or find what makes it so large."
            )
            evidence = {"largest": size, "end": end}
            yield finding_at(entry, step=step, kind="near-overflow", says=says, evidence=evidence)
