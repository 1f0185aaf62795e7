"""Calls of one object's method are followed, and nothing is left of it afterwards."""

from __future__ import annotations

import pytest

from traindiff.observe.torch.sharding.deepspeed_step import around


class Optimizer:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def step(self, number: int) -> int:
        self.calls.append(number)
        if number < 0:
            raise ValueError("negative")
        return 2 * number


def test_functions_are_called_before_and_after_and_the_result_is_untouched() -> None:
    optimizer = Optimizer()
    with around(optimizer, "step", before=optimizer.calls.append, after=optimizer.calls.append):
        assert optimizer.step(3) == 6

    assert optimizer.calls == [3, 3, 6]
    assert "step" not in vars(optimizer)


def test_nothing_is_called_after_a_call_that_raised() -> None:
    optimizer = Optimizer()
    with around(optimizer, "step", after=optimizer.calls.append), pytest.raises(ValueError, match="negative"):
        optimizer.step(-1)

    assert optimizer.calls == [-1]


def test_what_somebody_had_put_in_its_place_is_put_back() -> None:
    optimizer = Optimizer()
    optimizer.__dict__["step"] = theirs = lambda number: number
    with around(optimizer, "step"):
        assert optimizer.step(3) == 3

    assert vars(optimizer)["step"] is theirs


def test_what_somebody_has_put_in_its_place_since_is_left() -> None:
    optimizer = Optimizer()
    with around(optimizer, "step"):
        optimizer.__dict__["step"] = theirs = lambda number: number

    assert vars(optimizer)["step"] is theirs
