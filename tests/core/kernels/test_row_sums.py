"""Sums over rows and columns in float64: the CPU kernel, and torch's way beside it, against NumPy."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch

from traindiff.core.kernels import row_sums as module
from traindiff.core.kernels.row_sums import BLOCK, LANES, row_sums, table_sums

kernel = pytest.importorskip("traindiff.core.kernels.cpu.row_sums")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = ((0, 5), (1, 1), (3, 7), (4, 8), (5, 9), (6, 255), (7, 256), (9, 257), (2, 600), (3, 0))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the sums are computed."""
    if request.param == "torch":
        monkeypatch.setattr(module, "installed", lambda _: ())
    return str(request.param)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_those_of_float64(shape: tuple[int, int], dtype: torch.dtype, way: str) -> None:  # noqa: ARG001
    rows, columns = shape
    matrix = drawn(*shape).to(dtype)
    factors, squares, signs = drawn(columns, seed=1), drawn(columns, seed=2).abs(), drawn(rows, seed=3)
    exact = matrix.double().numpy()

    found = row_sums(matrix, factors, squares).numpy()
    by_column, by_row, norm = (one.numpy() for one in table_sums(matrix, signs, factors))

    terms = exact * factors.numpy()
    so_far = [np.abs(terms[:, :end].sum(1)) for end in (*range(BLOCK, columns, BLOCK), columns)]
    lanes = [terms[:, lane::LANES].sum(1) for lane in range(LANES)]
    largest = np.maximum(np.square(so_far).max(0, initial=0.0), np.square(lanes).sum(0))
    expected = [terms.sum(1), np.square(exact) @ squares.numpy(), largest]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(by_column, [signs.numpy() @ exact, np.square(exact).sum(0)], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(by_row, [terms.sum(1), np.square(exact).sum(1)], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(norm, np.linalg.norm(exact), rtol=1e-12)


def test_rows_that_lie_apart_in_memory_are_read_where_they_are(way: str) -> None:  # noqa: ARG001
    whole = drawn(9, 40).float()
    part = whole[1:8, 3:33]
    factors = drawn(30, seed=1)

    assert torch.equal(row_sums(part, factors, factors.abs()), row_sums(part.clone(), factors, factors.abs()))
    assert torch.allclose(
        row_sums(whole.T, drawn(9), drawn(9).abs()), row_sums(whole.T.clone(), drawn(9), drawn(9).abs())
    )


def test_a_row_with_nan_spoils_no_other(way: str) -> None:  # noqa: ARG001
    matrix = drawn(6, 20).float()
    right = row_sums(matrix, drawn(20), drawn(20).abs())
    matrix[2, 7] = torch.nan

    found = row_sums(matrix, drawn(20), drawn(20).abs())

    assert found[:, 2].isnan().any()
    assert torch.equal(found[:, [0, 1, 3, 4, 5]], right[:, [0, 1, 3, 4, 5]])


def test_the_kernel_reads_and_writes_nothing_beyond_the_matrix() -> None:
    page = mmap.PAGESIZE
    area = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), page, 0)
    rows, columns = 5, 13
    place = page - 4 * rows * columns
    matrix = torch.frombuffer(area, dtype=torch.float32, count=rows * columns, offset=place).view(rows, columns)
    matrix.copy_(drawn(rows, columns))

    found, other = (
        row_sums(matrix, drawn(columns), drawn(columns).abs()),
        table_sums(matrix, drawn(rows), drawn(columns)),
    )

    assert torch.equal(found, row_sums(matrix.clone(), drawn(columns), drawn(columns).abs()))
    assert all(map(torch.equal, other, table_sums(matrix.clone(), drawn(rows), drawn(columns))))
