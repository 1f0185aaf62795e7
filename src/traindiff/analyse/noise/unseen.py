"""Noise of activations that cannot be compared, because the samples of a batch are in another order."""

from __future__ import annotations

import math

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.noise.uncalibrated import SEEN_FLIPS
from traindiff.core.summary import rounding


class UnseenNoise:
    """Expects how far rounding on the data's path moves what is computed at its end.

    Losses and gradients do not depend on the order of samples, so they are still compared. But the differences that
    lead to them are unknown.
    """

    def __init__(self) -> None:
        self._squares = 0.0
        self._gates = 0  # elements of the largest gradient of which gates have set some to zero

    def saw(self, pair: Pair) -> None:
        """Note a site on the data's path."""
        summary, dtypes = pair.baseline.summary, (pair.baseline.dtype, pair.candidate.dtype)
        self._squares += (max(rounding(dtype) for dtype in dtypes) / 2) ** 2
        if pair.baseline.key.phase == "backward" and 0 < int(summary["zero"]) < int(summary["count"]):
            self._gates = max(self._gates, int(summary["count"]))

    def behind(self, flow: float, *, floor: float, dtype: str) -> float:
        """Relative L2 difference to expect behind the noted sites; 0 if the `flow` of differences there is known.

        Each differs by half of an operation's floor, independently: n of them add up to sqrt(n) times that. Gates
        (ReLU) turn a relative error e of their inputs into about a share e of elements that differ as a whole; see
        `Floors.gated`. What cancels raises its own rounding, and as much that of the sites before it.

        Args:
            flow: Largest difference of what leads to a site; infinite if that is unknown.
            floor: The site's own floor.
            dtype: The site's dtype.
        """
        once = rounding(dtype)
        if not (math.isinf(flow) and once):
            return 0.0
        rounded = math.sqrt(self._squares)
        gated = math.sqrt(rounded) if rounded * self._gates >= SEEN_FLIPS else rounded
        return gated * max(1.0, floor / once)
