"""Rerun names the operator that makes the results NaN or infinite, not one whose NaN or -inf does no harm."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.observe.nonfinite.test_rerun import saved
from traindiff.core.kernels.extent import extent
from traindiff.observe.torch.nonfinite.cause import CauseReport, find_cause

CAUSAL = torch.ones(5, 5).triu(1).bool()
FULL = torch.full((2, 5, 4), 500.0)


class Calls(nn.Module):
    """A function of a weight of ones and of what the module is given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.weight, *args)


def run_again(
    function: Callable[..., Any], *args: Any, directory: Path, dtype: torch.dtype = torch.float32
) -> CauseReport:
    model = Calls(function).to(dtype)
    given = [one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one for one in args]
    return find_cause(saved(model, *given, directory=directory))


def _attended(scores: Tensor, x: Tensor) -> Tensor:
    return (scores.softmax(-1) @ x) * x


def _scores(x: Tensor) -> Tensor:
    return x @ x.mT * 1e-4


MASKED: dict[str, Callable[..., Tensor]] = {
    "a constant": lambda w, x: _attended(_scores(x * w * 0.1).masked_fill(CAUSAL, -math.inf), x),
    "a tensor made inside": lambda w, x: _attended(
        _scores(x * w * 0.1) + torch.full((5, 5), -math.inf, dtype=x.dtype).triu(1), x
    ),
    "an input": lambda w, x, mask: _attended(_scores(x * w * 0.1) + mask, x),
    "what where leaves out": lambda w, x: _attended(
        torch.where(CAUSAL, (_scores(x * w * 0.1) * 0).log(), _scores(x * w * 0.1)), x
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_is_not_what_makes_a_product_overflow(name: str, tmp_path: Path) -> None:
    mask = [torch.zeros(5, 5).masked_fill(CAUSAL, -math.inf)] if name == "an input" else []
    found = run_again(MASKED[name], FULL, *mask, directory=tmp_path, dtype=torch.float16)
    first = found.native.first_non_finite
    assert (found.cause, first and first.name) == ("dtype", "aten.mul.Tensor")
    assert first is not None
    assert first.position == len(found.native.made) - 1
    assert "in float32 the largest is 2.5e+05, above float16's 65504, and what comes out is finite." in found.message


def test_a_row_that_is_masked_whole_makes_nan_of_the_mask(tmp_path: Path) -> None:
    found = run_again(
        lambda w, x: (x * w).masked_fill(torch.tensor(True), -math.inf).softmax(-1), FULL, directory=tmp_path
    )
    assert found.cause == "mathematics"
    assert "aten._softmax.default makes NaN or infinity of an infinity that is a mask or a constant" in found.message
    assert "put a large finite number in its place" in found.message


def test_an_infinity_in_the_code_is_named_as_a_constant(tmp_path: Path) -> None:
    def writes(w: Tensor, x: Tensor) -> Tensor:
        found = x * w
        found[0] = math.inf
        return found

    for number, function in enumerate((writes, lambda w, x: x * w * math.inf)):
        found = run_again(function, FULL, directory=tmp_path / str(number))
        assert found.cause == "mathematics"
        assert "makes NaN or infinity of an infinity that is a mask or a constant" in found.message


def test_nan_that_is_overwritten_is_no_source(tmp_path: Path) -> None:
    def overwritten(w: Tensor, x: Tensor) -> Tensor:
        room = (x * 0).log()
        room.copy_(x * w)
        return room * 1e38

    found = run_again(overwritten, FULL, directory=tmp_path)
    assert found.native.first_non_finite is not None
    assert found.native.first_non_finite.name == "aten.mul.Tensor"
    assert found.cause == "dtype"


COMPLEX: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a spectrum": (lambda w, x: torch.fft.fft(x * w), "aten._fft_r2c.default"),
    "a product": (lambda w, x: torch.polar(x * w, x) * 1e36, "aten.mul.Tensor"),
    "its parts": (lambda w, x: torch.view_as_real(torch.complex(x * w, x) * 1e36), "aten.mul.Tensor"),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_that_overflow_are_seen(name: str, tmp_path: Path) -> None:
    function, operator = COMPLEX[name]
    found = run_again(function, torch.full((2, 4), 3e38 if name == "a spectrum" else 1e3), directory=tmp_path)
    first = found.native.first_non_finite
    assert (found.cause, first and first.name) == ("dtype", operator)
    assert found.message.startswith("The overflow is complex64's")


def test_a_complex_number_whose_magnitude_alone_overflows_is_finite() -> None:
    for dtype in (torch.complex64, torch.complex128):
        largest = torch.finfo(dtype).max
        tensor = torch.tensor([complex(largest, -largest), 1 + 0j], dtype=dtype)
        assert extent(tensor).is_finite
        assert extent(tensor).largest == largest
        for part in (math.inf, math.nan):
            assert not extent(torch.tensor([complex(0, part)], dtype=dtype)).is_finite


CREATED: dict[str, Callable[..., Tensor]] = {
    "scattered into zeros": lambda w, x: torch.zeros(4).scatter_add(0, torch.tensor([0, 0, 1, 1]), x * w),
    "put into zeros": lambda w, x: torch.zeros(4).index_put((torch.tensor([0, 0]),), x[:2] * w[:2], accumulate=True),
    "sampled": lambda w, x: functional.grid_sample(
        (x * w).expand(1, 1, 4, 4, 4), torch.zeros(1, 1, 1, 1, 3), align_corners=False
    ) * 10,
    "weighted": lambda w, x: functional.cross_entropy(x[None] * w, torch.tensor([0]), weight=torch.full((4,), 1e-40))
    + (x * 10).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", CREATED)
def test_tensors_made_of_sizes_alone_are_of_the_longer_dtype_too(name: str, tmp_path: Path) -> None:
    found = run_again(CREATED[name], torch.full((4,), 3e38), directory=tmp_path)
    assert not any(run.failed for run in found.runs().values())
    assert found.cause == "dtype"


def test_the_default_dtype_of_the_training_is_that_of_the_rerun(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        where = saved(Calls(lambda w, x: torch.zeros(4).index_add(0, torch.tensor([0]), x[:1] * w[:1] * 10)),
                      torch.full((4,), 1e308) * 1.5, directory=tmp_path)  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
    found = find_cause(where)
    assert not found.native.failed
    assert found.cause == "mathematics"
