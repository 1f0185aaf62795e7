"""How far two updates may be apart if one optimizer computes its bias corrections in float32, the other in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from traindiff.analyse.merge.site import StepTable
from traindiff.core.summary import UNIT_ROUNDOFF, number

_WEIGHTS = {"betas[0]": 1.0, "betas[1]": 0.5}
"""Power of a bias correction in an update: that of the second moment is under a root."""

_RECTIFIED = 5.0
"""RAdam multiplies an update by a factor that depends on 1 - beta^t if its rho exceeds this."""


def counts_in_float32(contents: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Type by name of the optimizers that compute with their count of steps in float32, by `rank.json` files."""
    found = (one for content in contents for one in content.get("optimizers", ()))
    return {one["name"]: one["type"] for one in found if one.get("counts_in_float32")}


def correction_error(table: StepTable, optimizers: Mapping[str, str]) -> float:
    """Largest relative error of an update of Adam and its kin in a step, if 1 - beta^t is computed in float32.

    Rounding beta moves beta^t by t beta^(t - 1) |float32(beta) - beta|, and the power itself is good to one unit in the
    last place. Both are relative to 1 - beta^t, which is small in the first steps. Measured with torch's AdamW, betas
    0.9 and 0.999 (0.9999): 1.0e-5 (1.1e-4) in step 2, 6.3e-6 (8.5e-5) in step 60; this gives 2.2e-5 (2.3e-4) and 6.7e-6
    (8.8e-5). In RAdam's factor the error is that of a difference of large numbers: 0.6 % in step 6, of 1.3 % here.

    Args:
        table: The step, with the settings of its optimizers and their counts of steps.
        optimizers: Type by name of those in question.
    """
    if not optimizers:
        return 0.0  # as a rule; a step has thousands of sites
    settings: dict[str, dict[str, float]] = {}
    counts: set[float] = set()
    for key, entry in table.items():
        if key.phase != "optimizer" or entry.unobserved:
            continue
        if key.group and key.slot in _WEIGHTS and key.group[0] in optimizers:
            settings.setdefault(key.path, {})[key.slot] = number(entry.summary)
        elif key.slot == "step":
            counts.add(number(entry.summary))
    rectified = "RAdam" in optimizers.values()
    errors = (
        sum(_WEIGHTS[slot] * _error(beta, count) for slot, beta in betas.items())
        + (_rectification_error(betas.get("betas[1]", 0.0), count) if rectified else 0.0)
        for betas in settings.values()
        for count in counts
    )
    return max(errors, default=0.0)


def _error(beta: float, count: float) -> float:
    """Relative error of 1 - beta^count in float32; 0 for numbers that no optimizer has."""
    if not (0.0 < beta < 1.0 <= count):
        return 0.0
    power: float = beta**count
    rounded = count * power / beta * abs(float(np.float32(beta)) - beta)
    return (rounded + (UNIT_ROUNDOFF["float32"] * power if count > 1.0 else 0.0)) / (1.0 - power)


def _rectification_error(beta: float, count: float) -> float:
    """Relative error of RAdam's sqrt((rho - 4) (rho - 2) / rho), of which rho is a difference; infinite near a jump.

    rho = rho_max - 2 t beta^t / (1 - beta^t) with rho_max = 2 / (1 - beta) - 1. Source: Liu et al., On the Variance of
    the Adaptive Learning Rate and Beyond, ICLR 2020, algorithm 2.
    """
    if not (0.0 < beta < 1.0 <= count):
        return 0.0
    most, power = 2.0 / (1.0 - beta) - 1.0, beta**count
    subtracted = 2.0 * count * power / (1.0 - power)
    rho, apart = most - subtracted, subtracted * _error(beta, count) + 2.0 * UNIT_ROUNDOFF["float32"] * most
    if abs(rho - _RECTIFIED) <= apart:
        return math.inf
    return 0.5 * apart * (1.0 / (rho - 4.0) + 1.0 / (rho - 2.0) - 1.0 / rho) if rho > _RECTIFIED else 0.0
