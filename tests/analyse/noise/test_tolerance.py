"""Tolerances that the user sets in place of floors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.analyse.merge.test_distance import pair
from traindiff.analyse.noise.tolerance import parse_tolerance
from traindiff.errors import ConfigError


@pytest.mark.parametrize(
    ("rtol", "atol", "floor"),
    [(0.1, None, 0.1), (None, 0.5, 0.25), (0.1, 0.5, 0.35), (0.0, 0.0, 0.0), (None, 0.0, 0.0)],
)
def test_tolerances_are_relative_to_the_baseline_and_absolute_per_element(
    rtol: float | None, atol: float | None, floor: float
) -> None:
    tolerance = parse_tolerance(rtol, atol)

    assert tolerance is not None
    assert tolerance.floor(pair(np.full(9, 2.0), np.zeros(9))) == pytest.approx(floor)


def test_of_a_baseline_of_zeros_every_absolute_tolerance_is_without_bound() -> None:
    zeros = pair(np.zeros(9), np.ones(9))

    for rtol, atol, floor in ((0.1, None, 0.1), (None, 1e-9, math.inf)):
        tolerance = parse_tolerance(rtol, atol)
        assert tolerance is not None
        assert tolerance.floor(zeros) == floor
    assert parse_tolerance(None, None) is None


@pytest.mark.parametrize("tolerance", [-1e-9, math.nan])
def test_a_tolerance_below_zero_is_refused(tolerance: float) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tolerance(tolerance, tolerance)

    assert [problem.where for problem in caught.value.problems] == [
        f"compare(rtol={tolerance})", f"compare(atol={tolerance})",
    ]  # fmt: skip
