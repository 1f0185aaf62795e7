"""Errors of batch statistics, which are the same for all rows of a channel: how large they are, and where."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.analyse.noise.test_site_floors import site
from tests.made_up import Array, random
from traindiff.analyse.noise.coherent import HANDED_ON, KERNELS, CoherentErrors, canceled_means
from traindiff.analyse.noise.gradients import Terms
from traindiff.analyse.noise.measured import SAFETY
from traindiff.core.summary import UNIT_ROUNDOFF

U = UNIT_ROUNDOFF["float32"]
OWN = SAFETY * math.sqrt(64) * U
"""The error of a mean over 64 rows."""

TERMS = {
    "bn": Terms(norm=1.0, count=512, summed=64.0),
    "fc": Terms(norm=6.0, count=128),
    "head": Terms(norm=1.0, count=8),
    "nothing": Terms(norm=0.0, count=0),
}


def floor(values: Array, *, phase: str, path: str, inputs: float = 1.0, own: float = 0.0, **about: str) -> float:
    weight = site(random(8, 4, 2, seed=1), phase="param", path="fc.weight")
    errors = CoherentErrors(TERMS, {"fc.weight": weight, "fc.bias": site(random(8, seed=1), phase="param")})
    return errors.floor(site(values, phase=phase, path=path, **about), inputs, own)


def test_a_gradient_of_an_output_has_the_error_of_the_statistics() -> None:
    assert floor(random(8, 4, seed=0), phase="backward", path="fc") == pytest.approx(OWN)
    assert floor(random(8, 4, seed=0), phase="backward", path="") == 0.0


def test_a_mean_over_rows_keeps_what_does_not_average_out() -> None:
    pooled = floor(random(8, 4, seed=0), phase="forward", path="pool")

    assert pooled == pytest.approx(HANDED_ON * OWN * math.sqrt(512 / 32))
    assert floor(random(8, 64, seed=0), phase="forward", path="pool") == 0.0  # as many elements as it has terms
    assert floor(random(8, 4, seed=0), phase="forward", path="pool", inputs=0.0) == 0.0


@pytest.mark.parametrize(("path", "expected"), [("fc", 1e-3 * math.sqrt(8)), ("head", 0.0)])
def test_an_output_sums_the_errors_of_its_weight_over_its_inputs(path: str, expected: float) -> None:
    assert floor(random(8, 4, seed=0), phase="forward", path=path, inputs=0.0, own=1e-3) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("path", "shape", "rows", "summed"),
    [
        ("fc.bias", (128,), 1, 2.0),  # the norms have 4 times as many terms
        ("fc.bias", (32,), 4, 2.0),
        ("fc.weight", (8, 4), 16, 4.0),
        ("bn.bias", (512,), 1, 1.0),
    ],
)
def test_a_gradient_sums_the_errors_of_its_rows(path: str, shape: tuple[int, ...], rows: int, summed: float) -> None:
    values = random(*shape, seed=0) * np.float32(100)  # nothing cancels

    assert floor(values, phase="grad", path=path) == pytest.approx(
        SAFETY * KERNELS * math.sqrt(rows) * U + HANDED_ON * OWN * summed
    )


def test_a_bias_of_which_the_terms_cancel_keeps_their_errors() -> None:
    values = np.zeros(32, dtype=np.float32)
    values[0] = 2.0  # a third of the norm of what is summed

    assert floor(values, phase="grad", path="fc.bias") == pytest.approx(
        (SAFETY * KERNELS * U + HANDED_ON * OWN) * 2.0 * 3.0
    )


@pytest.mark.parametrize(
    ("values", "phase", "path", "slot"),
    [
        (random(8, seed=0), "grad", "unknown.bias", "grad"),
        (random(8, seed=0), "grad", "fc.bias", "norm"),
        (random(0, seed=0), "grad", "fc.bias", "grad"),
        (np.array(1.0, dtype=np.float32), "grad", "fc.bias", "grad"),
        (random(8, seed=0), "update", "fc.bias", "update"),
        (random(8, seed=0, dtype="float64"), "backward", "fc", ""),
    ],
)
def test_elsewhere_there_is_no_such_error(values: Array, phase: str, path: str, slot: str) -> None:
    assert floor(values, phase=phase, path=path, slot=slot) == 0.0


def test_without_batch_statistics_there_is_none() -> None:
    errors = CoherentErrors({"fc": Terms(norm=1.0, count=128)}, {})

    assert errors.floor(site(random(8, 4, seed=0), phase="backward"), 1.0, 0.0) == 0.0


def test_a_module_without_terms_has_its_own_error_only() -> None:
    assert floor(random(8, seed=0), phase="grad", path="nothing.bias") == pytest.approx(
        SAFETY * KERNELS * U + HANDED_ON * OWN
    )


def test_a_running_mean_that_is_mathematically_zero_is_held_against_the_spread_of_its_terms() -> None:
    buffers = {
        "bn.running_mean": np.full(4, 1e-3, dtype=np.float32),
        "bn.running_var": np.full(4, 1.0, dtype=np.float32),
        "other.running_mean": np.full(4, 1e-3, dtype=np.float32),
        "zero.running_mean": np.zeros(4, dtype=np.float32),
        "zero.running_var": np.full(4, 1.0, dtype=np.float32),
    }

    found = canceled_means(site(one, phase="param", path=path, slot="buffer") for path, one in buffers.items())

    assert {key.path: value for key, value in found.items()} == {"bn.running_mean": pytest.approx(1000.0, rel=1e-3)}
