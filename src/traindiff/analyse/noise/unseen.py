"""Noise of activations that cannot be compared: samples are in another order, or the runs cut the batch differently."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import MergedSite
from traindiff.analyse.noise.uncalibrated import GAIN, SEEN_FLIPS, Floors
from traindiff.core.summary import rounding


class UnseenNoise:
    """Expects how far rounding on the data's path moves what is computed at its end.

    Losses and gradients do not depend on the order of samples, so they are still compared. But the differences that
    lead to them are unknown.
    """

    def __init__(self) -> None:
        self._squares = 0.0
        self._coarsest = 0.0
        self._gates = 0  # elements of the largest gradient of which gates have set some to zero

    def saw(self, pair: Pair) -> None:
        """Note a site on the data's path."""
        summary, dtypes = pair.baseline.summary, (pair.baseline.dtype, pair.candidate.dtype)
        once = max(rounding(dtype) for dtype in dtypes)
        self._squares += (once / 2) ** 2
        self._coarsest = max(self._coarsest, once)
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
        once = max(rounding(dtype), self._coarsest)  # a floor under autocast is that of the shorter dtype
        if not (math.isinf(flow) and once):
            return 0.0
        rounded = math.sqrt(self._squares)
        gated = math.sqrt(rounded) if rounded * self._gates >= SEEN_FLIPS else rounded
        return gated * max(1.0, floor / once)


_MARGIN = 3.0
"""Gradients behind unplaced sites, as a multiple of the expected noise there: gates and sums that cancel add to it."""


class UnplacedNoise:
    """Expects the noise on the data's path at sites whose rows two runs cut differently.

    Each adds half of an operation's floor, independently, as in `UnseenNoise`: n of them add up to sqrt(n) times that.
    What is computed behind them, above all the gradients of parameters, may differ by `_MARGIN` times as much.

    Args:
        sites: The baseline's entries, in execution order.
    """

    def __init__(self, sites: Sequence[MergedSite]) -> None:
        flowing = [site for site in sites if site.key.phase != "batch"]
        units = [rounding(site.dtype) for site in flowing]
        self._orders = [site.order for site in flowing]
        self._precision = list(accumulate(units, max))
        self._squares = list(accumulate((unit / 2) ** 2 for unit in units))

    def __bool__(self) -> bool:
        """True if there are any."""
        return bool(self._orders)

    def enter(self, floors: Floors, *, until: int, flows: bool) -> None:
        """Enter those up to a place in execution order into floors; their noise only if differences flow on."""
        passed = bisect_right(self._orders, until)
        if passed:
            floors.precision = max(floors.precision, self._precision[passed - 1])
            floors.saw(_MARGIN / GAIN * math.sqrt(self._squares[passed - 1]) if flows else 0.0)
