"""What is said of a norm or a sum that moved further than rounding moves it."""

from __future__ import annotations

from traindiff.analyse.compare.case import Diagnosis
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.noise.moments import Moved
from traindiff.core.summary import norm_of

KIND = "systematic"
"""Kind of a finding about a norm or a sum."""


def systematic(pair: Pair, moved: Moved) -> Diagnosis:
    """The finding about a norm or a sum; its elements differ by no more than rounding."""
    baseline, candidate = pair.baseline.summary, pair.candidate.summary
    times = f"{moved.apart / moved.unit:.3g} x what rounding would change it"
    evidence = {"statistic": moved.statistic, "units": moved.apart / moved.unit}
    if moved.statistic == "norm":
        factor = norm_of(candidate) / norm_of(baseline)
        message = f"The norm is {factor:.6g} x the baseline's: {times}."
        return Diagnosis(kind=KIND, message=message, evidence={**evidence, "factor": factor})
    sums = float(baseline["sum"]), float(candidate["sum"])
    message = f"The sum of all elements is {sums[1]:.6g}, and {sums[0]:.6g} in the baseline: {times}."
    return Diagnosis(kind=KIND, message=message, evidence=evidence)
