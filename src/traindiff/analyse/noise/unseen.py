"""Noise of activations that cannot be compared, because the samples of a batch are in another order."""

from __future__ import annotations

import math

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.noise.uncalibrated import SEEN_FLIPS
from traindiff.core.summary import UNIT_ROUNDOFF


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
        self._squares += max(UNIT_ROUNDOFF.get(dtype, 0.0) for dtype in dtypes) ** 2
        if pair.baseline.key.phase == "backward" and 0 < int(summary["zero"]) < int(summary["count"]):
            self._gates = max(self._gates, int(summary["count"]))

    def behind(self, flow: float) -> float:
        """Relative L2 difference to expect behind the noted sites; 0 if the `flow` of differences there is known.

        Each rounds once, independently: n of them add up to sqrt(n) u. Gates (ReLU) turn a relative error e of their
        inputs into about a share e of elements that differ as a whole; see `Floors.gated`.
        """
        rounded = math.sqrt(self._squares) if math.isinf(flow) else 0.0
        return math.sqrt(rounded) if rounded * self._gates >= SEEN_FLIPS else rounded
