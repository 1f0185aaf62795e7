"""The error of bias corrections in float32: above what torch makes, and not far above."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tests.made_up import summary_of
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.noise.corrections import correction_error, counts_in_float32

STEPS = 80


def table(betas: tuple[float, float], step: int, name: str = "optimizer") -> StepTable:
    """A step of an optimizer, as far as the error depends on it."""
    numbers = {
        (f"{name}.groups[0]", "betas[0]"): betas[0],
        (f"{name}.groups[0]", "betas[1]"): betas[1],
        ("fc.weight", "step"): float(step),
    }
    found = {}
    for (path, slot), value in numbers.items():
        values = np.array(value, np.float64)
        key = SiteKey("optimizer", "", path, slot, 0, 0)
        found[key] = MergedSite(key=key, order=0, dtype="float64", shape=(), summary=summary_of(values), exact=True)
    return found


def updates(betas: tuple[float, float], *, in_float32: bool) -> list[Tensor]:
    """The updates of torch's AdamW for the same gradients."""
    torch.manual_seed(0)
    first, second, count, found = torch.zeros(512), torch.zeros(512), torch.tensor(0.0), []
    for _ in range(STEPS):
        parameter = torch.zeros(512)
        adamw(
            [parameter], [torch.randn(512)], [first], [second], [], [count], amsgrad=False, beta1=betas[0],
            beta2=betas[1], lr=1e-3, weight_decay=0.0, eps=1e-8, maximize=False, foreach=False,
            differentiable=in_float32,
        )  # fmt: skip
        found.append(parameter.double())
    return found


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.95, 0.9999), (0.9, 0.99), (0.8, 0.9995)])
def test_it_bounds_what_torch_makes(betas: tuple[float, float]) -> None:
    own = 8 * 2.0**-24  # of the other operations

    both = zip(updates(betas, in_float32=False), updates(betas, in_float32=True), strict=True)
    for step, (exact, short) in enumerate(both, 1):
        apart = float((short - exact).norm() / exact.norm())
        error = correction_error(table(betas, step), {"optimizer": "AdamW"})
        assert apart <= error + own
        assert error <= 6.0 * max(apart, 2e-6) + own


def test_it_is_that_of_optimizers_that_count_in_float32() -> None:
    step = table((0.9, 0.999), 1)

    assert correction_error(step, {"optimizer": "AdamW"}) == pytest.approx(6.7e-6, rel=0.02)
    assert correction_error(step, {"another": "AdamW"}) == 0.0
    assert correction_error({}, {"optimizer": "AdamW"}) == 0.0
    assert correction_error(table((0.0, 1.0), 1), {"optimizer": "AdamW"}) == 0.0


def test_the_factor_of_radam_is_a_difference_of_large_numbers() -> None:
    at = {step: correction_error(table((0.9, 0.999), step), {"optimizer": "RAdam"}) for step in (1, 5, 6, 100)}

    assert at[1] == pytest.approx(6.7e-6, rel=0.02)
    assert at[5] == math.inf  # its rho is 4.99, and above 5 it is another formula
    assert 0.006 < at[6] < 0.02
    assert at[100] < 1e-3


def test_optimizers_that_count_in_float32_are_known_by_the_recordings() -> None:
    content = {"optimizers": [{"name": "a", "type": "Adam", "counts_in_float32": True}, {"name": "b", "type": "SGD"}]}

    assert counts_in_float32([content, {}]) == {"a": "Adam"}
