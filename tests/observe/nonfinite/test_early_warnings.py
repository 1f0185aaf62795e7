"""Early signs: each is warned of with numbers, once in a hundred steps, and not in a healthy training."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.observe.nonfinite.trainings import WIDTH, Scale, train
from traindiff.observe.torch.nonfinite.early_warnings import EVERY


class Wide(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(WIDTH, 256), Scale(), nn.Linear(256, 4)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.scale(self.first(x).to(self.dtype))
        return self.last(hidden.float() * 1e-9)


def warned(**settings: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", traindiff.TraindiffWarning)
        train(**settings)
    return [str(one.message) for one in caught if issubclass(one.category, traindiff.TraindiffWarning)]


def test_numbers_near_the_end_of_float16_are_warned_of_once() -> None:
    def breaks(model: Any, _: Any, step: int) -> None:
        model.scale.factor = 2e4 if step >= 2 else 1.0

    (message,) = warned(make=lambda: Wide(torch.float16), breaks=breaks, steps=6)

    assert message.startswith("step 2: scale output reaches ")
    assert "within a factor of 4 of float16's largest number, 6.55e+04" in message


def test_the_warning_comes_again_after_a_hundred_steps() -> None:
    def breaks(model: Any, _: Any, step: int) -> None:
        model.scale.factor = 2e4 if step in (0, 5, EVERY + 1) else 1.0

    said = warned(make=lambda: Wide(torch.float16), breaks=breaks, steps=EVERY + 3)
    assert [one.partition(":")[0] for one in said] == ["step 0", f"step {EVERY + 1}"]


def test_units_that_die_are_warned_of_with_their_share() -> None:
    def breaks(model: Any, _: Any, step: int) -> None:
        if step == EVERY - 1:
            model[0].bias.data[:200] = -100.0

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 4))

    said = warned(make=make, breaks=breaks, steps=EVERY + 1, loss_of=lambda output: output.mean() * 1e-3)
    assert len(said) == 1
    assert said[0].startswith(f"step {EVERY}: 8") or said[0].startswith(f"step {EVERY}: 9")
    assert "are zero, up from" in said[0]


def test_subnormal_numbers_are_warned_of() -> None:
    def breaks(model: Any, _: Any, step: int) -> None:
        model.scale.factor = 1e-5 if step == EVERY else 1.0

    said = warned(make=lambda: Wide(torch.float16), breaks=breaks, steps=EVERY + 1)
    assert any("of scale output are subnormal, up from 0%" in one for one in said)


@pytest.mark.parametrize(
    ("name", "factor", "message"),
    [
        ("float16", 1e6, "would overflow in float16"),
        ("float8_e4m3fn", 1e4, "would overflow in float8_e4m3fn"),
        ("bfloat16", 1e-40, "would become zero in bfloat16"),
        ("float8_e5m2", 1e-7, "would become zero in float8_e5m2"),
    ],
)
def test_what_a_shorter_dtype_would_lose_is_said_where_it_is_asked_for(name: str, factor: float, message: str) -> None:
    def breaks(model: Any, _: Any, _step: int) -> None:
        model.scale.factor = factor

    def run(**settings: Any) -> list[str]:
        return warned(make=Wide, breaks=breaks, steps=1, loss_of=lambda output: output.sum() * 1e9, **settings)

    assert any(message in one for one in run(warn=name))
    assert not any(message in one for one in run())


def test_a_healthy_training_gives_no_sign() -> None:
    assert warned(make=Wide, steps=EVERY + 2, warn=("limit", "zeros", "subnormals")) == []


def test_no_sign_is_given_that_was_not_asked_for() -> None:
    def breaks(model: Any, _: Any, _step: int) -> None:
        model.scale.factor = 2e4

    assert warned(make=lambda: Wide(torch.float16), breaks=breaks, steps=2, warn=()) == []
