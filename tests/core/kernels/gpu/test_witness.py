"""The sums of the witness on a GPU are what torch computes in float64."""

from __future__ import annotations

import pytest
import torch

from traindiff.core.kernels import contribution as contribution_by_torch
from traindiff.core.kernels import product_errors as errors_by_torch
from traindiff.core.kernels import projection as by_torch
from traindiff.core.kernels import row_errors as rows_by_torch
from traindiff.core.kernels import row_sums as sums_by_torch
from traindiff.core.kernels.contribution import Rounding
from traindiff.core.kernels.gpu import contribution, product_errors, projection
from traindiff.core.kernels.row_errors import Weights
from traindiff.core.summary import UNIT_ROUNDOFF
from traindiff.core.witness import PROBES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (3, 7), (70, 32), (33, 300), (130, 257))
BY = Weights(output=1e-3, added=1e-4, partial=1e-4, coherent=2e-3, most=3.0, lost=1e-9, lost_by_input=1e-8)


@pytest.fixture(autouse=True)
def _without_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (by_torch, sums_by_torch, errors_by_torch, rows_by_torch, contribution_by_torch):
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
def test_witnessed_weights_are_added_up(
    dtype: torch.dtype, shape: tuple[int, int], strided: bool, device: torch.device
) -> None:
    matrix = matrix_of(shape, dtype, device)
    if strided:
        matrix = matrix.t().contiguous().t()
    rows, columns = (signs_of(length, device=device) for length in shape)

    found = product_errors.table_sums(matrix, rows, columns)

    torch.testing.assert_close(found, sums_by_torch.table_sums(matrix, rows, columns), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 7, 2), (40, 300, 257), (2100, 33, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_witnessed_products_have_the_errors_that_torch_finds(
    dtype: torch.dtype, sizes: tuple[int, int, int], added: bool, strided: bool, device: torch.device
) -> None:
    rows, terms, columns = sizes
    left, weight = matrix_of((rows, terms), dtype, device), matrix_of((columns, terms), dtype, device, mean=0.0)
    bias = matrix_of((1, columns), dtype, device)[0] if added else None
    made = (left.double() @ weight.double().T + (0.0 if bias is None else bias.double())).to(dtype)
    made[rows // 2, columns // 2] += 0.5
    made[::3, 0] = torch.nan
    if strided:
        left, made = (one.t().contiguous().t() for one in (left, made))
    signs = signs_of(columns, device=device)
    right, _, norm = sums_by_torch.table_sums(weight, signs, signs_of(terms, device=device))

    found = product_errors.product_errors(left, right, made, signs, bias, BY, norm, (7, 8, 9))

    expected = errors_by_torch.product_errors(left, right, made, signs, bias, BY, norm, (7, 8, 9))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_witnessed_products_of_zeros_have_no_error(device: torch.device) -> None:
    left, right = torch.zeros(20, 3, device=device), torch.zeros(2, 3, dtype=torch.float64, device=device)
    made, signs = torch.zeros(20, 5, device=device), signs_of(5, device=device)

    assert product_errors.product_errors(left, right, made, signs, None, BY, 0.0, ()).tolist() == [0.0] * 5


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
