"""Products of linear layers: right ones are within rounding, wrong ones are found in their row."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from tests.observe.products.checking import KINDS, drawn
from traindiff.analyse.rules.products import ROW, WHOLE
from traindiff.core.kernels import row_errors
from traindiff.core.witness import CHECKED
from traindiff.observe.torch.witness.layer_products import (
    check_gradient,
    check_output,
    factor_of,
    plain_weight,
    product_node,
)

WEIGHTS = ("normal", "positive", "constant", "skewed", "sparse", "alternating")
SHAPES = ((100, 7, 3), (1, 64, 64), (60, 64, 200), (40, 700, 9), (300, 1, 1), (50, 40, 1))


def numbers(vector: Tensor) -> dict[str, float]:
    return dict(zip(CHECKED, vector.tolist(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_right_products_stay_far_below_the_limits(dtype: torch.dtype) -> None:
    for (rows, inputs, outputs), of_x, of_weight in itertools.product(SHAPES, KINDS, WEIGHTS):
        x, weight = drawn(of_x, rows, inputs).to(dtype), drawn(of_weight, outputs, inputs, seed=1).to(dtype)
        gradient = drawn(of_x, rows, outputs, seed=3).to(dtype)
        bias = drawn("normal", outputs, seed=2).to(dtype) if rows % 3 else None
        factor = factor_of(weight, dtype)

        found = numbers(check_output(factor, x, bias, functional.linear(x, weight, bias)))
        backward = numbers(check_gradient(factor, gradient, gradient @ weight, (rows,)))

        for one, terms in ((found, inputs), (backward, outputs)):
            assert one["residual"] < 0.7 * ROW
            assert one["error"] <= 0.5 * WHOLE * one["allowed"]
            assert (one["terms"], one["rows"], one["positions"]) == (terms, rows, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_wrong_element_is_found_at_its_row(dtype: torch.dtype) -> None:
    x, weight = drawn("normal", 3, 20, 64).to(dtype), drawn("normal", 96, 64, seed=1).to(dtype)
    output = functional.linear(x, weight)
    output[2, 11, 5] += 8.0

    found = numbers(check_output(factor_of(weight, dtype), x, None, output))

    assert found["residual"] > 2 * ROW
    assert (found["row"], found["rows"], found["positions"]) == (2 * 20 + 11, 60, 20)
    assert found["median"] < 0.5


def test_autocast_is_known_by_the_dtype_of_the_output() -> None:
    x, weight = drawn("normal", 30, 64).float(), drawn("normal", 96, 64, seed=1).float()
    with torch.autocast("cpu", torch.bfloat16):
        output = functional.linear(x, weight)

    found = numbers(check_output(factor_of(weight, output.dtype), x, None, output))

    assert output.dtype == torch.bfloat16
    assert 0.0 < found["residual"] < 0.7 * ROW


def test_rows_that_are_not_finite_are_not_judged_and_hide_no_other() -> None:
    x, weight = drawn("normal", 30, 64).float(), drawn("normal", 96, 64, seed=1).float()
    x[3, 0], x[4, 0] = torch.nan, torch.inf
    output = functional.linear(x, weight)
    right = numbers(check_output(factor_of(weight, torch.float32), x, None, output))
    output[20, 3] += 10.0

    found = numbers(check_output(factor_of(weight, torch.float32), x, None, output))

    assert 0.0 < right["residual"] < 0.7 * ROW
    assert (found["row"], found["residual"] > ROW) == (20, True)


def test_the_kernel_and_torch_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = (drawn("normal", *shape, seed=len(shape)).float() for shape in ((2, 30, 64), (96, 64), (96,)))
    output = functional.linear(x, weight, bias)
    factor = factor_of(weight, torch.float32)
    by_kernel = check_output(factor, x, bias, output)
    monkeypatch.setattr(row_errors, "installed", lambda _: ())

    assert torch.allclose(check_output(factor, x, bias, output), by_kernel, rtol=1e-12)


def test_the_weight_is_read_only_where_that_runs_no_code() -> None:
    layer = nn.Linear(3, 2)
    normalized = parametrizations.spectral_norm(nn.Linear(3, 2))
    pruned = prune.random_unstructured(nn.Linear(3, 2), "weight", 0.5)

    assert plain_weight(layer) is layer.weight
    assert plain_weight(normalized) is None
    assert plain_weight(pruned) is pruned.weight


@pytest.mark.parametrize(
    ("shape", "bias"), [((5, 4), True), ((5, 4), False), ((2, 5, 4), True), ((2, 5, 4), False)], ids=str
)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_node_of_the_product_is_found(shape: tuple[int, ...], bias: bool, autocast: bool) -> None:
    layer, x = nn.Linear(4, 3, bias=bias), torch.randn(shape, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(x)
    found = product_node(output)
    assert found is not None
    node, place = found
    seen: list[tuple[torch.Size, torch.Size]] = []
    node.register_hook(lambda given, gradients: seen.append((given[place].shape, gradients[0].shape)))

    output.sum().backward()

    assert [(one[-1], other[-1]) for one, other in seen] == [(4, 3)]


@pytest.mark.parametrize("make", [lambda x: nn.Linear(4, 3)(x), lambda x: x * 2.0], ids=["no gradient", "no product"])
def test_there_is_no_node_where_the_gradient_of_the_input_is_not_computed(make: Callable[[Tensor], Tensor]) -> None:
    assert product_node(make(torch.randn(5, 4))) is None
