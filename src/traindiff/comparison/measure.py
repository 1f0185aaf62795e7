"""How far apart the two sides of a pair are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from traindiff.comparison.alignment import Pair
from traindiff.comparison.floors import UNIT_ROUNDOFF
from traindiff.errors import ConfigError, Problem
from traindiff.summary import distance, norm, scale


def equal_bits(pair: Pair) -> bool:
    """Whether both sides are known to hold the same bits."""
    left, right = pair.baseline, pair.candidate
    return bool(
        left.exact
        and right.exact
        and left.dtype == right.dtype
        and left.shape == right.shape
        and left.factor == right.factor
        and left.summary["fingerprint"] == right.summary["fingerprint"]
    )


def difference(pair: Pair) -> float | None:
    """Relative L2 difference, `||candidate - baseline|| / ||baseline||`, from the sketches.

    Returns:
        0 for equal bits; inf where shapes or non-finite elements differ, or only the baseline is
        all zero; None for whole numbers that differ, which have no distance.
    """
    left, right = pair.baseline, pair.candidate
    if equal_bits(pair):
        return 0.0
    if left.dtype not in UNIT_ROUNDOFF or right.dtype not in UNIT_ROUNDOFF:
        return None
    if left.shape != right.shape or int(left.summary["nan"]) != int(right.summary["nan"]):
        return math.inf
    if left.exact and right.exact and left.summary["nonfinite"] != right.summary["nonfinite"]:
        return math.inf
    apart, size = float(distance(left.summary, right.summary)), float(norm(left.summary))
    if math.isnan(apart):
        return math.inf
    return apart / size if size else math.inf if apart else 0.0


def rescaled(pair: Pair, factor: float) -> Pair:
    """The pair with the baseline multiplied by a factor; its bits are then no longer known."""
    summary = scale(pair.baseline.summary, abs(factor))
    if factor < 0:
        summary["sum"], summary["sketch"] = -summary["sum"], -summary["sketch"]
    return Pair(baseline=replace(pair.baseline, summary=summary, exact=False), candidate=pair.candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Tolerances that the user set, in place of floors: `||c - b|| <= rtol ||b|| + atol sqrt(n)`."""

    rtol: float
    atol: float

    def floor(self, pair: Pair) -> float:
        """The same, relative to the baseline's norm."""
        size = float(norm(pair.baseline.summary))
        absolute = self.atol * math.sqrt(int(pair.baseline.summary["count"]))
        if not absolute:
            return self.rtol
        return self.rtol + (absolute / size if size else math.inf)


def parse_tolerance(rtol: float | None, atol: float | None) -> Tolerance | None:
    """What the user set in place of floors; None where nothing was.

    Raises:
        ConfigError: A tolerance is negative or NaN.
    """
    problems = [
        Problem(
            where=f"compare({name}={value!r})",
            what="must be a number from 0 up.",
            fix=f"Write e.g. {name}=1e-5, or leave it out to judge by floors.",
        )
        for name, value in (("rtol", rtol), ("atol", atol))
        if value is not None and not value >= 0
    ]
    if problems:
        raise ConfigError("compare(...)", problems, consequence="nothing was compared")
    return None if rtol is None and atol is None else Tolerance(rtol=rtol or 0.0, atol=atol or 0.0)
