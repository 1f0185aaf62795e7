"""What the steps so far tell of a loss: how large it was, and how steep in the outputs that it is computed from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.core.summary import UNIT_ROUNDOFF, norm_of, number

_LARGE = 0.1
"""Part of the largest loss from which on a loss tells its curvature. A sum that passes zero is small by chance."""


@dataclass(frozen=True, slots=True)
class SeenHead:
    """What earlier steps tell of an output that the loss is computed from.

    Attributes:
        curvature: Of the loss, in the latest step: `||g||^2 / (2 L)`.
        loss: The loss in that step.
        largest: The largest norm of its gradient.
        steepest: The largest curvature, of steps with a large loss.
    """

    curvature: float
    loss: float
    largest: float
    steepest: float


class SeenNow(NamedTuple):
    """An output that the loss of a step is computed from, its gradient, and what is known before and with this step."""

    output: MergedSite
    gradient: MergedSite
    before: SeenHead | None
    now: SeenHead


@dataclass(slots=True)
class SeenLoss:
    """What earlier steps tell of the loss.

    Attributes:
        heads: By output that it is computed from.
        largest: Its largest absolute value.
        latest: Its absolute value when it was seen last in a step; 0 if it was not, or was not finite.
        signed: Whether it has been negative. Then its size tells nothing of its curvature.
        scale: In the first step, the size of a weight's gradient over that of its terms, where it was largest; at most
            1. A training may divide its gradients by hand, which cancels nothing. None before.
        lacks_scale: Whether gradients of such weights were all zero so far, so that a later step tells the scale.
    """

    heads: dict[SiteKey, SeenHead] = field(default_factory=dict)
    largest: float = 0.0
    latest: float = 0.0
    signed: bool = False
    scale: float | None = None
    lacks_scale: bool = False

    def used(self, clipped: float = 1.0) -> float:
        """Factor by which gradients that the optimizer used are smaller than what the backward pass made of them.

        Args:
            clipped: Factor by which clipping made them smaller.
        """
        return clipped * (self.scale or 1.0)

    def see(self, entries: Iterable[MergedSite]) -> Iterator[SeenNow]:
        """Note a step, and each output from which its loss is computed.

        Args:
            entries: Of the step, in execution order.
        """
        outputs: dict[SiteKey, MergedSite] = {}
        self.latest, led = 0.0, False
        for entry in entries:
            key = entry.key
            if entry.unobserved:
                continue
            if key.phase == "loss" and key.slot == "backward":
                self._see_loss(entry)
            elif key.phase == "forward" and not key.stage and entry.dtype in UNIT_ROUNDOFF:
                outputs[key] = entry
            elif key.phase == "backward" and self.latest and not (led and key.path):
                output = outputs.get(key._replace(phase="forward"))
                if output is not None:
                    yield from self._see_head(output, entry)
                    led |= int(entry.summary["count"]) > 1

    def _see_loss(self, entry: MergedSite) -> None:
        loss = number(entry.summary)
        self.latest = abs(loss) if math.isfinite(loss) else 0.0
        self.signed, self.largest = self.signed or loss < 0.0, max(self.largest, self.latest)

    def _see_head(self, output: MergedSite, gradient: MergedSite) -> Iterator[SeenNow]:
        g, y, loss = norm_of(gradient.summary), norm_of(output.summary), self.latest
        if not (g > 0.0 and y > 0.0 and math.isfinite(g * g * y / loss)):
            return
        curvature, before = g * g / (2.0 * loss), self.heads.get(output.key)
        most, steepest = (g, 0.0) if before is None else (max(g, before.largest), before.steepest)
        if loss >= _LARGE * self.largest:
            steepest = max(steepest, curvature)
        self.heads[output.key] = SeenHead(curvature=curvature, loss=loss, largest=most, steepest=steepest)
        yield SeenNow(output, gradient, before, self.heads[output.key])
