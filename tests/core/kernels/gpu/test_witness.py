"""The sums of the witness on a GPU are what torch computes in float64."""

from __future__ import annotations

import pytest
import torch

from traindiff.core.kernels import contribution as contribution_by_torch
from traindiff.core.kernels import projection as by_torch
from traindiff.core.kernels import row_errors as errors_by_torch
from traindiff.core.kernels import row_sums as sums_by_torch
from traindiff.core.kernels.contribution import Rounding
from traindiff.core.kernels.gpu import contribution, projection, row_errors, row_sums
from traindiff.core.kernels.row_errors import Weights
from traindiff.core.summary import UNIT_ROUNDOFF
from traindiff.core.witness import PROBES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (3, 7), (70, 32), (33, 300), (130, 257))
BY = Weights(output=1e-3, added=1e-4, partial=1e-4, coherent=2e-3, most=3.0, lost=1e-9, lost_by_input=1e-8)


@pytest.fixture(autouse=True)
def _without_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (by_torch, sums_by_torch, errors_by_torch, contribution_by_torch):
        monkeypatch.setattr(module, "installed", lambda _: ())


def matrix_of(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, *, mean: float = 0.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) + mean).to(device, dtype)


def signs_of(*shape: int, device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (2 * torch.randint(0, 2, shape, generator=generator) - 1).to(device, dtype)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_witnessed_rows_are_multiplied_by_signs(
    dtype: torch.dtype, shape: tuple[int, int], strided: bool, device: torch.device
) -> None:
    matrix = matrix_of(shape, dtype, device)
    if strided:
        matrix = matrix.t().contiguous().t()
    signs = signs_of(PROBES, shape[1], device=device, dtype=torch.float32)

    found = projection.projected(matrix, signs)

    torch.testing.assert_close(found, matrix.double() @ signs.double().T, rtol=2e-7, atol=2e-5)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_witnessed_rows_are_normalized(
    dtype: torch.dtype, shape: tuple[int, int], centered: bool, device: torch.device
) -> None:
    matrix, gradient = matrix_of(shape, dtype, device), matrix_of(shape, dtype, device, mean=0.0)
    signs = signs_of(PROBES, shape[1], device=device, dtype=torch.float32)

    found, shift = projection.normalized(matrix, gradient, signs, eps=1e-3, centered=centered)

    x, g = matrix.double(), gradient.double()
    mean = x.mean(1, keepdim=True) if centered else x.new_zeros(())
    scale = ((x - mean).square().mean(1, keepdim=True) + 1e-3).rsqrt()
    torch.testing.assert_close(found, (g * (x - mean) * scale) @ signs.double().T, rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(shift, (g * mean * scale).square().sum(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 511, 512, 513, 9001])
def test_witnessed_tables_are_multiplied(rows: int, one_row: bool, device: torch.device) -> None:
    left = matrix_of((rows, PROBES), torch.float32, device).double()
    right = signs_of(1 if one_row else rows, PROBES, device=device)

    found = projection.summed(left, right)

    torch.testing.assert_close(found, by_torch.summed(left, right), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_witnessed_rows_and_columns_are_added_up(
    dtype: torch.dtype, shape: tuple[int, int], strided: bool, device: torch.device
) -> None:
    matrix = matrix_of(shape, dtype, device)
    if strided:
        matrix = matrix.t().contiguous().t()
    rows, columns = (signs_of(length, device=device) for length in shape)
    weights = torch.rand(shape[1], generator=torch.Generator().manual_seed(0)).double().to(device)

    found = row_sums.row_sums(matrix, columns, weights)
    by_column, by_row = row_sums.table_sums(matrix, rows, columns)

    torch.testing.assert_close(found, sums_by_torch.row_sums(matrix, columns, weights), rtol=1e-12, atol=1e-12)
    expected = sums_by_torch.table_sums(matrix, rows, columns)
    torch.testing.assert_close((by_column, by_row), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 1023, 1025, 5000])
@pytest.mark.parametrize("added", [(0.0, 0.0), (0.5, 0.25)])
def test_witnessed_errors_are_those_of_torch(rows: int, added: tuple[float, float], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(rows)
    sums = torch.randn(3, rows, generator=generator, dtype=torch.float64)
    sums[1:] = sums[1:].square()
    made = sums * (1.0 + 1e-3 * torch.randn(3, rows, generator=generator, dtype=torch.float64))
    made[0] += added[0]
    made[0, ::5] = sums[0, ::5] + added[0]  # exact rows
    made[0, 3::7] = torch.nan
    sums, made = sums.to(device), made.to(device)
    of_tensors = tuple(torch.tensor(one, dtype=torch.float64, device=device) for one in added)

    found = row_errors.row_errors(sums, made, BY, 2.0, of_tensors, (7, 8))  # type: ignore[arg-type]

    expected = errors_by_torch.row_errors(sums, made, BY, 2.0, added, (7, 8))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_witnessed_rows_of_zeros_have_no_error(device: torch.device) -> None:
    zeros = torch.zeros(3, 20, dtype=torch.float64, device=device)

    assert row_errors.row_errors(zeros, zeros, BY, 2.0, (0.0, 0.0)).tolist() == [0.0] * 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [0, 1, 12, 70_000])
@pytest.mark.parametrize("runs", [1.0, 3.0])
def test_a_witnessed_contribution_is_rounded_as_by_torch(
    rows: int, dtype: str, runs: float, device: torch.device
) -> None:
    u = UNIT_ROUNDOFF[dtype]
    by = Rounding(sums=u, exact=2.0**-24, width=7, result=u, operand=2.0**-11, smallest=2.0**-25, size=50)
    totals = torch.tensor([1.0, -2.0, 3.0, 0.5, 20.0, 40.0 / runs], dtype=torch.float64)
    expected = contribution_by_torch.contribution(totals, rows, 0.75, by)

    of_numbers = contribution.contribution(totals.to(device), rows, 0.75, by)
    shift = torch.tensor(0.75, dtype=torch.float64, device=device)
    of_tensors = contribution.contribution(totals.to(device), torch.tensor(rows, device=device), shift, by)

    torch.testing.assert_close(of_numbers.cpu(), expected, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(of_tensors.cpu(), expected, rtol=1e-13, atol=0.0)
