"""An operator that runs again: one element that differs is odd, and differences as rounding makes them are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from traindiff.observe.torch.products.repetition import has_odd_element


def product(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(0)).to(dtype)


def with_one(tensor: Tensor, change: Callable[[float], float]) -> Tensor:
    found = tensor.clone()
    found[3, 2] = change(float(found[3, 2]))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_other_number_is_odd(dtype: torch.dtype) -> None:
    right, unit = product(dtype), torch.finfo(dtype).eps / 2.0

    assert has_odd_element([with_one(right, lambda x: x * (1.0 + 100.0 * unit))], lambda: [right])
    assert has_odd_element([with_one(right, lambda _: float("nan"))], lambda: [right])
    assert has_odd_element([right, with_one(right, lambda x: -x)], lambda: [right, right])


def test_what_rounding_does_is_not_odd() -> None:
    right = product()

    assert not has_odd_element([right], lambda: [right.clone()])
    assert not has_odd_element([with_one(right, lambda x: x * (1.0 + 2.0**-22))], lambda: [right])
    assert not has_odd_element([right * (1.0 + 2.0**-18)], lambda: [right])
    assert not has_odd_element([right, right], lambda: [with_one(right, lambda x: x + 1.0), -right])


def test_an_operator_that_never_repeats_itself_is_not_judged() -> None:
    right = product()
    runs = iter([[right], [with_one(right, lambda _: 5.0)]])

    assert not has_odd_element([with_one(right, lambda x: -x)], lambda: next(runs))


def test_tensors_that_are_not_in_memory_are_not_looked_at() -> None:
    assert not has_odd_element([product().to("meta")], lambda: [product()])
