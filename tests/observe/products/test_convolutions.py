"""Convolutions and their gradients: right ones are exact, wrong ones are found at the right place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.observe.products.checking import aten, checked, drawn, only, ratio, worst
from traindiff.analyse.rules.products import ROW, WHOLE
from traindiff.observe.torch.products import convolutions


def arguments(choose: random.Random, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of `aten.convolution` without the bias."""
    num_axes, groups = choose.choice((1, 2, 2, 3)), choose.choice((1, 1, 2, 4))
    inputs, outputs = groups * choose.choice((1, 3)), groups * choose.choice((1, 2, 5))
    width = [choose.choice((1, 2, 3)) for _ in range(num_axes)]
    stride, padding, dilation = ([choose.choice(some) for _ in range(num_axes)] for some in ((1, 2, 3), (0, 1), (1, 2)))
    transposed = choose.random() < 0.4
    more = [choose.randrange(max(pair)) if transposed else 0 for pair in zip(stride, dilation, strict=True)]
    kind = choose.choice(("normal", "positive", "sparse", "skewed", "shifted"))
    images = drawn(kind, choose.choice((1, 3)), inputs, *[choose.choice((9, 10, 11)) for _ in range(num_axes)])
    shape = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
    weight = drawn("normal", *shape, *width, seed=1)
    return images.to(dtype), weight.to(dtype), None, stride, padding, dilation, transposed, more, groups


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_right_convolutions_and_their_gradients_stay_far_below_the_limits(dtype: torch.dtype) -> None:
    choose = random.Random(0)
    done = 0
    for _ in range(40):
        given = arguments(choose, dtype)
        images, weight, _, *how = given
        try:
            output = aten.convolution.default(*given)
        except RuntimeError:  # the kernel is larger than the image, or the padding of the output is not allowed
            continue
        bias = drawn("normal", output.shape[1], seed=2).to(dtype)
        gradient = drawn("normal", *output.shape, seed=3).to(dtype)
        found = [
            only(aten.convolution.default, images, weight, bias, *how),
            *checked(aten.convolution_backward.default, gradient, images, weight, None, *how, [True, True, False]),
        ]
        assert [one.slot for one in found] == ["output[0]", "output[0]", "output[1]"]
        assert found[0].residual.rows.shape == (output.shape[0], *output.shape[2:])
        assert found[1].residual.rows.shape == (images.shape[0], *images.shape[2:])
        assert found[2].residual.rows.shape == weight.shape[:1]
        for one in found:
            assert worst(one) < 0.5 * ROW
            assert ratio(one) < 0.5 * WHOLE
        done += 1
    assert done > 20


@pytest.mark.parametrize("kind", ["normal", "constant", "sparse"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_that_is_added_up_image_by_image_in_a_short_dtype_is_not_flagged(
    kind: str, dtype: torch.dtype
) -> None:
    for num_axes, stride, transposed in ((1, 1, False), (2, 2, False), (2, 1, True), (3, 2, True)):
        images = drawn(kind, 64, 8, *[9] * num_axes).to(dtype)
        weight = drawn("normal", 8, 8, *[3] * num_axes, seed=1).to(dtype)
        how = ([stride] * num_axes, [1] * num_axes, [1] * num_axes, transposed, [0] * num_axes, 1)
        gradient = drawn("normal", *aten.convolution.default(images, weight, None, *how).shape, seed=3).to(dtype)

        found = checked(aten.convolution_backward.default, gradient, images, weight, None, *how, [True, True, False])

        assert max(map(worst, found)) < 0.5 * ROW
        assert max(map(ratio, found)) < 0.5 * WHOLE


def images_and_filters() -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    return drawn("normal", 4, 6, 9, 9).float(), drawn("normal", 8, 3, 3, 3, seed=1).float(), ([1, 1], [1, 1], [1, 1])


def test_one_wrong_element_of_a_convolution_is_found_at_its_position() -> None:
    images, weight, how = images_and_filters()

    def spoiled(output: Tensor) -> Tensor:
        output[2, 5, 3, 7] += 1.0
        return output

    one = only(aten.convolution.default, images, weight, None, *how, False, [0, 0], 2, spoiled=spoiled)

    assert int(one.residual.worst) == 2 * 81 + 3 * 9 + 7
    assert worst(one) > 10.0 * ROW


@pytest.mark.parametrize(("which", "place", "row"), [(0, (2, 5, 3, 7), 2 * 81 + 3 * 9 + 7), (1, (6, 2, 1, 0), 6)])
@pytest.mark.parametrize("error", [1.0, 1e-2])
def test_one_wrong_element_of_a_gradient_is_found_at_its_position(
    which: int, place: tuple[int, ...], row: int, error: float
) -> None:
    images, weight, how = images_and_filters()
    gradient = drawn("normal", 4, 8, 9, 9, seed=3).float()

    def spoiled(output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        output[which][place] += error * float(output[which].norm())
        return output

    found = checked(
        aten.convolution_backward.default, gradient, images, weight, None, *how, False, [0, 0], 2,
        [True, True, False], spoiled=spoiled,
    )  # fmt: skip

    assert worst(found[1 - which]) < 0.5 * ROW
    assert (int(found[which].residual.worst), worst(found[which]) > 10.0 * ROW) == (row, True)


SPOILED: dict[str, Callable[[Tensor], Tensor]] = {
    "one channel is lost": lambda output: output.index_fill(1, torch.tensor([3]), 0.0),
    "bfloat16 inside": lambda output: output.bfloat16().float(),
    "1 % too large": lambda output: output * 1.01,
}


@pytest.mark.parametrize("name", SPOILED)
def test_an_inexact_convolution_is_far_above_what_float32_allows(name: str) -> None:
    images, weight, how = images_and_filters()

    one = only(aten.convolution.default, images, weight, None, *how, False, [0, 0], 2, spoiled=SPOILED[name])

    assert ratio(one) > 10.0 * WHOLE


def test_many_images_are_converted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    images, weight, how = images_and_filters()
    gradient = drawn("normal", 4, 8, 9, 9, seed=3).float()

    def results() -> list[Any]:
        given = (gradient, images, weight, None, *how, False, [0, 0], 2, [True, True, False])
        return [one.residual for one in checked(aten.convolution_backward.default, *given)]

    whole = results()
    monkeypatch.setattr(convolutions, "MOST_ELEMENTS", 1)
    parts = results()
    assert torch.allclose(parts[0].rows, whole[0].rows, rtol=1e-3)
    for part, one in zip(parts, whole, strict=True):
        assert float(part.error) == pytest.approx(float(one.error), rel=1e-6)
    assert bool((parts[1].rows <= whole[1].rows * 1.001).all())  # partial sums are measured after each part
