"""Errors of the rows of a product, by the kernel and by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from traindiff.core.kernels import row_errors as module
from traindiff.core.kernels.row_errors import Weights, bound_of, row_errors

BY = Weights(output=1e-3, added=1e-4, partial=1e-4, coherent=2e-3, most=3.0, lost=1e-9, lost_by_input=1e-8)
LARGEST, ADDED = 2.0, (0.5, 0.25)
BOUND = bound_of(BY, LARGEST, ADDED)


def tables(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of rows, and of rows that are nearly the same."""
    generator = torch.Generator().manual_seed(rows)
    sums = torch.randn(3, rows, generator=generator, dtype=torch.float64)
    sums[1:] = sums[1:].square()
    made = sums * (1.0 + 1e-3 * torch.randn(3, rows, generator=generator, dtype=torch.float64))
    made[0] += BOUND.offset
    return sums, made


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the errors are computed."""
    if request.param == "torch":
        monkeypatch.setattr(module, "installed", lambda _: ())
    return str(request.param)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 100, 333])
def test_the_numbers_follow_from_their_definition(rows: int, way: str) -> None:  # noqa: ARG001
    sums, made = tables(rows)
    made[0, ::5] = sums[0, ::5] + BOUND.offset  # exact rows
    (total, weighted, largest), result = sums.numpy(), np.sqrt(made[1].numpy())
    terms = np.sqrt(weighted)
    partial = np.maximum(np.sqrt(largest), np.maximum(terms, result))
    coherence = np.clip(partial / terms, 1.0, BOUND.most)
    errors = np.abs(made[0].numpy() - (total + BOUND.offset))
    bounds = BOUND.result * result + (BOUND.partial + BOUND.coherent * coherence) * partial + BOUND.constant
    ratios = errors / bounds
    inexact = np.sort(ratios[ratios > 0])
    size = max(np.linalg.norm(terms), np.linalg.norm(result))

    found = row_errors(sums, made, BY, LARGEST, ADDED, (7, 8)).numpy()

    median = inexact[(inexact.size - 1) // 2] if inexact.size else 0.0
    expected = [ratios.max(), ratios.argmax(), median, np.linalg.norm(errors) / size, np.linalg.norm(bounds) / size]
    np.testing.assert_allclose(found, [*expected, 7, 8], rtol=1e-12)


def test_rows_that_are_not_finite_count_as_right(way: str) -> None:  # noqa: ARG001
    sums, made = tables(40)
    finite = row_errors(sums[:, 2:].contiguous(), made[:, 2:].contiguous(), BY, LARGEST, ADDED)
    made[:, 0], sums[:, 1] = torch.nan, torch.inf

    found = row_errors(sums, made, BY, LARGEST, ADDED)

    assert found[1] == finite[1] + 2
    assert torch.allclose(found[[0, 2, 3, 4]], finite[[0, 2, 3, 4]], rtol=1e-12)


def test_zeros_have_no_error(way: str) -> None:  # noqa: ARG001
    zeros = torch.zeros(3, 20, dtype=torch.float64)

    assert row_errors(zeros, zeros, BY, LARGEST, (0.0, 0.0)).tolist() == [0.0] * module.NUMBERS
