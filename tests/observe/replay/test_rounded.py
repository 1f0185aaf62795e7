"""Bounds of running error analysis hold for what torch computes, and say what they do not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from traindiff.observe.torch.replay.rounded import Rounded, by_sign, maximum, minimum, sqrt

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rounded(tensor: Tensor, **about: Any) -> Rounded:
    info = torch.finfo(tensor.dtype)
    return Rounded(tensor.double(), unit=info.eps / 2.0, tiny=info.tiny, **about)


def numbers(dtype: torch.dtype, *, seed: int) -> Tensor:
    """Of many sizes and both signs, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 1, 400)[torch.randperm(400, generator=generator)]
    found = torch.randn(400, generator=generator) * sizes
    found[::37] = 0.0
    return found.to(dtype)


EXPRESSIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "difference that cancels": lambda a, b: (a + b) - a,
    "product": lambda a, b: a * b * 0.3,
    "quotient": lambda a, b: a / (abs(b) + 0.1),
    "constant": lambda a, b: 0.9 * a + (1 - 0.9) * b,
    "constant in front": lambda a, b: 1.0 - 0.7 * a - 2.0 / (abs(b) + 1.0),
    "square": lambda a, b: a.square() + b**2,
    "root": lambda a, b: sqrt(0.99 * a * a + 0.01 * b * b) + 1e-3,
    "rsqrt": lambda a, b: (a.square() + 0.01).rsqrt() * b,
    "negative": lambda a, b: -a + abs(b),
    "larger": lambda a, b: maximum(0.999 * a, abs(b)),
    "smaller": lambda a, b: minimum(a, 0.5 * b),
    "clamp": lambda a, b: (a * b).clamp(-0.3, 0.7),
    "sign": lambda a, b: (0.9 * a + 0.1 * b).sign() * 0.01,
    "torch's functions": lambda a, b: torch.sqrt(torch.abs(a)) + torch.sign(b) * 0.1,
    "mean": lambda a, b: (a * b).mean(),
    "norm": lambda a, b: (a * b).norm() + a,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_what_torch_computes_is_within_the_bound(expression: str, dtype: torch.dtype) -> None:
    a, b = numbers(dtype, seed=1), numbers(dtype, seed=2)

    found = EXPRESSIONS[expression](rounded(a), rounded(b))
    exact = EXPRESSIONS[expression](a.double(), b.double())
    computed = EXPRESSIONS[expression](a, b).double()

    torch.testing.assert_close(torch.as_tensor(found.value), exact, rtol=1e-12, atol=1e-14)
    assert ((computed - found.value).abs() <= found.error).all()
    if expression not in ("sign", "torch's functions", "mean", "clamp"):  # else the bound is not idle
        certain = torch.as_tensor(found.error).expand_as(exact)[exact.abs() > exact.abs().max() / 10]
        assert (certain < 40 * torch.finfo(dtype).eps * exact.abs().max()).all()


def test_an_expression_that_begins_with_the_parameter_is_stored_in_its_dtype() -> None:
    parameter = rounded(torch.ones(3), is_stored=True)
    gradient = rounded(torch.ones(3, dtype=torch.bfloat16))

    stored = parameter * (1 - 0.1) - 0.001 * gradient
    assert (stored.is_stored, stored.unit) == (True, 2.0**-24)
    assert float(stored.error.max()) < 1e-4

    coupled = gradient + 0.1 * parameter
    assert (coupled.is_stored, coupled.unit) == (False, 2.0**-8)
    assert not (0.1 * parameter).is_stored


def test_a_sign_that_rounding_may_change_is_uncertain() -> None:
    a = rounded(torch.tensor([1.0, -1.0, 1.0, 0.0], dtype=torch.bfloat16))
    b = rounded(torch.tensor([1.0, 1.0, -1.0 - 2.0**-7, 0.0], dtype=torch.bfloat16))

    found = by_sign(a + b, positive=1.2, zero=1.0, negative=0.5)

    assert found.value.tolist() == [1.2, 1.0, 0.5, 1.0]
    assert (found.error[1:3] >= 0.69).all()
    assert (found.error[[0, 3]] < 0.01).all()  # 0 + 0 is exact


def test_a_divisor_that_may_be_zero_bounds_nothing() -> None:
    a = rounded(torch.tensor([1.0], dtype=torch.bfloat16))
    nearly = (a + 1e-3) - a

    assert float((a / nearly).error) > float((a / nearly).value)


def test_constants_are_rounded_to_float32_and_powers_of_two_are_exact() -> None:
    a = rounded(torch.ones(1))

    assert float((a * 0.5).error) == pytest.approx(2.0**-24 * 0.5, rel=1e-6)
    assert float((a * 0.3).error) == pytest.approx(2 * 2.0**-24 * 0.3, rel=1e-6)


def test_powers_of_numbers_in_float32_keep_their_error() -> None:
    """As the bias corrections of capturable optimizers do: 1 - beta^t."""
    step = Rounded(1000.0, unit=2.0**-24)

    found = 1.0 - 0.999**step

    computed = float(1.0 - torch.tensor(0.999) ** torch.tensor(1000.0))
    assert abs(computed - float(found)) <= found.error < 1e-4
    assert step.square().value == 1e6
    assert (step**0.5).value == 1000.0**0.5
    assert step > 999.0
    assert not step < 999.0
    assert bool(step)


def test_functions_whose_rounding_is_unknown_are_refused() -> None:
    with pytest.raises(TypeError, match=r"a formula cannot use torch\.erf, because its rounding is unknown"):
        torch.erf(rounded(torch.ones(2)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a formula can use the norm with p=2 only, not p=1"):
        rounded(torch.ones(2)).norm(1)


def test_tensors_may_stand_on_either_side() -> None:
    a, b = rounded(torch.ones(2)), torch.tensor([2.0, 3.0])

    assert (a * b).value.tolist() == (b * a).value.tolist() == [2.0, 3.0]
    assert (a - b).value.tolist() == [-1.0, -2.0]
    assert (b - a).value.tolist() == [1.0, 2.0]
    assert (b / a).value.tolist() == [2.0, 3.0]
