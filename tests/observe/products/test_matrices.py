"""Matrix products: right ones are as exact as their formats allow, and wrong ones are far off in the right row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.observe.products.checking import KINDS, aten, checked, drawn, only, ratio, worst
from traindiff.analyse.rules.products import ROW, WHOLE
from traindiff.observe.torch.products import matrices
from traindiff.observe.torch.products.operators import NotJudgedError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1, 1), (3, 5, 2), (33, 384, 48), (5, 3000, 9), (64, 7, 130))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_right_products_stay_far_below_the_limits(dtype: torch.dtype, kind: str) -> None:
    for other in KINDS:
        for rows, terms, columns in SHAPES:
            left = drawn(kind, rows, terms).to(dtype)
            right = drawn(other, terms, columns, seed=1).to(dtype)
            bias = drawn(kind, columns, seed=2).to(dtype)
            for one in (
                only(aten.mm.default, left, right),
                only(aten.mm.default, left.T.contiguous().T, right.T.contiguous().T),
                only(aten.addmm.default, bias, left, right),
            ):
                judged = one.residual.rows[~one.residual.rows.isnan()]
                assert judged.numel() == 0 or float(judged.max()) < 0.5 * ROW, (other, rows, terms, columns)
                assert float(one.residual.error) <= 0.5 * WHOLE * float(one.residual.allowed)
                assert one.num_terms == terms


CALLS: dict[str, Callable[[], Any]] = {
    "bmm": lambda: only(aten.bmm.default, drawn("normal", 3, 8, 16).float(), drawn("normal", 3, 16, 4).float()),
    "broadcast bmm": lambda: only(
        aten.bmm.default, drawn("normal", 1, 8, 16).expand(3, 8, 16).float(), drawn("normal", 3, 16, 4).float()
    ),
    "baddbmm": lambda: only(
        aten.baddbmm.default, drawn("shifted", 3, 8, 4).float(), drawn("normal", 3, 8, 16).float(),
        drawn("normal", 3, 16, 4).float(), beta=0.5, alpha=3.0,
    ),
    "baddbmm in place": lambda: only(
        aten.baddbmm_.default, drawn("shifted", 3, 8, 4).float(), drawn("normal", 3, 8, 16).float(),
        drawn("normal", 3, 16, 4).float(), beta=0.5,
    ),
    "addmm in place": lambda: only(
        aten.addmm_.default, drawn("shifted", 8, 4).float(), drawn("normal", 8, 16).float(),
        drawn("normal", 16, 4).float(), beta=-2,
    ),
    "addmm out": lambda: only(
        aten.addmm.out, drawn("shifted", 4).float(), drawn("normal", 8, 16).float(), drawn("normal", 16, 4).float(),
        out=torch.empty(8, 4),
    ),
    "addmm without what is there": lambda: only(
        aten.addmm.default, torch.full((8, 4), torch.nan), drawn("normal", 8, 16).float(),
        drawn("normal", 16, 4).float(), beta=0,
    ),
    "mv": lambda: only(aten.mv.default, drawn("normal", 8, 16).float(), drawn("normal", 16).float()),
    "addmv": lambda: only(
        aten.addmv.default, drawn("normal", 8).float(), drawn("normal", 8, 16).float(), drawn("normal", 16).float(),
        beta=2.0, alpha=0.5,
    ),
    "dot": lambda: only(aten.dot.default, drawn("normal", 16).float(), drawn("normal", 16).float()),
    "longer output": lambda: only(
        aten.mm.default, drawn("normal", 8, 16).bfloat16(), drawn("normal", 16, 4).bfloat16()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_each_operator_is_checked_with_all_that_it_adds(name: str) -> None:
    one = CALLS[name]()

    assert 0.0 <= worst(one) < 0.5 * ROW
    assert 0.0 < float(one.residual.allowed) < 0.02


def scaled(*, rowwise: bool, dtype: torch.dtype, spoiled: Callable[[Tensor], Tensor] = lambda output: output) -> Any:
    left = drawn("normal", 32, 64).to(torch.float8_e4m3fn)
    right = drawn("normal", 48, 64, seed=1).to(torch.float8_e4m3fn).T
    scales = (torch.rand(32, 1) + 0.1, torch.rand(1, 48) + 0.1) if rowwise else (torch.tensor(0.5), torch.tensor(3.0))
    return only(aten._scaled_mm.default, left, right, *scales, out_dtype=dtype, spoiled=spoiled)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_of_scaled_fp8_are_checked_as_their_inputs_are(rowwise: bool, dtype: torch.dtype) -> None:
    assert worst(scaled(rowwise=rowwise, dtype=dtype)) < 0.5 * ROW
    wrong = scaled(rowwise=rowwise, dtype=dtype, spoiled=lambda output: output * 1.1)
    assert ratio(wrong) > WHOLE
    assert str(wrong.form).startswith("float8_e4m3fn x float8_e4m3fn -> ")


@pytest.mark.parametrize("dims", [(2, 3), (3, 2), (2, 2)])
def test_each_group_of_a_grouped_product_is_checked(dims: tuple[int, int]) -> None:
    ends = torch.tensor([3, 8, 8, 16], dtype=torch.int32)
    shapes = {(2, 3): ((16, 32), (4, 32, 16)), (3, 2): ((4, 8, 32), (32, 16)), (2, 2): ((32, 16), (16, 32))}
    left, right = (drawn("normal", *shape, seed=seed).bfloat16() for seed, shape in enumerate(shapes[dims]))

    found = checked(aten._grouped_mm.default, left, right, ends)

    assert [one.slot for one in found] == ["output[0][0]", "output[0][1]", "output[0][3]"]  # the third is empty
    assert max(map(worst, found)) < 0.5 * ROW


def at(row: int, column: int, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def spoiled(output: Tensor) -> Tensor:
        output = output.clone()
        output[row, column] = change(output[row, column])
        return output

    return spoiled


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_wrong_element_is_found_in_its_row(dtype: torch.dtype) -> None:
    left, right = drawn("normal", 40, 64).to(dtype), drawn("normal", 64, 24, seed=1).to(dtype)

    one = only(aten.mm.default, left, right, spoiled=at(17, 5, lambda value: value + 20.0))

    assert int(one.residual.worst) == 17
    assert worst(one) > 4.0 * ROW
    assert float(one.residual.median) < 1.0


def test_a_flipped_bit_is_found_in_every_position_that_matters() -> None:
    left, right = drawn("normal", 40, 64).float(), drawn("normal", 64, 24, seed=1).float()
    size = float((left @ right).norm(dim=1).mean())
    for bit in range(32):

        def flip(value: Tensor, bit: int = bit) -> Tensor:
            return (
                value.view(torch.int32) ^ torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            ).view(torch.float32)

        before = (left @ right)[17, 5]
        error = float((flip(before) - before).abs())
        one = only(aten.mm.default, left, right, spoiled=at(17, 5, flip))
        if error > 1e-4 * size:
            assert (int(one.residual.worst), worst(one) > ROW) == (17, True), bit


def short_sums(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The product, whose partial sums are rounded after each term."""
    total = torch.zeros(left.shape[0], right.shape[1], dtype=dtype)
    for term in range(left.shape[1]):
        total = (total.float() + left[:, term : term + 1].float() * right[term : term + 1].float()).to(dtype)
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_in_the_output_dtype_are_less_exact_than_the_format_allows(dtype: torch.dtype) -> None:
    left, right = drawn("normal", 40, 512).to(dtype), drawn("normal", 512, 24, seed=1).to(dtype)

    one = only(aten.mm.default, left, right, spoiled=lambda _: short_sums(left, right, dtype))

    assert ratio(one) > WHOLE
    assert float(one.residual.median) > 1.5  # in every row


def test_inputs_that_were_rounded_to_tf32_are_found() -> None:
    left, right = drawn("normal", 40, 512).float(), drawn("normal", 512, 24, seed=1).float()

    def tf32(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)

    one = only(aten.mm.default, left, right, spoiled=lambda _: tf32(left) @ tf32(right))

    assert ratio(one) > 10.0 * WHOLE


@pytest.fixture
def rounding_to_bf16() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("rounding_to_bf16")
def test_the_format_says_what_the_settings_allow_and_so_do_the_limits() -> None:
    left, right = drawn("normal", 40, 512).float(), drawn("normal", 512, 24, seed=1).float()
    short = (left.bfloat16().float(), right.bfloat16().float())

    one = only(aten.mm.default, left, right, spoiled=lambda _: short[0] @ short[1])

    assert str(one.form) == "float32 x float32 -> float32, inputs may be rounded to BF16"
    assert worst(one) < ROW


def test_the_relative_error_is_that_of_the_product() -> None:
    left, right = drawn("normal", 200, 64), drawn("normal", 64, 100, seed=1)
    wrong = left @ right + 0.01 * drawn("normal", 200, 100, seed=2)
    exact = left @ right

    one = only(aten.mm.default, left, right, spoiled=lambda _: wrong)

    assert float(one.residual.error) == pytest.approx(float((wrong - exact).norm() / exact.norm()), rel=0.1)


def test_rows_that_are_not_finite_are_not_judged() -> None:
    left, right = drawn("normal", 6, 16).float(), drawn("normal", 16, 4).float()
    left[2, 3], left[4, 1] = torch.nan, torch.inf

    one = only(aten.mm.default, left, right)

    assert one.residual.rows.isnan().tolist() == [False, False, True, False, True, False]
    assert float(one.residual.error) < 1e-6
    assert int(one.residual.worst) not in (2, 4)


def test_products_without_elements_or_terms_are_left_out() -> None:
    assert checked(aten.mm.default, torch.zeros(0, 4), torch.zeros(4, 3)) == []
    assert checked(aten.mm.default, torch.zeros(2, 0), torch.zeros(0, 3)) == []


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ((torch.ones(2, 2, dtype=torch.int64),) * 2, "it is a product of int64"),
        ((torch.ones(2, 2, dtype=torch.complex64),) * 2, "it is a product of complex64"),
        ((torch.ones(2, 2).to_sparse(), torch.ones(2, 2)), "a factor is sparse_coo"),
    ],
)
def test_other_numbers_are_not_judged(tensors: tuple[Tensor, Tensor], reason: str) -> None:
    with pytest.raises(NotJudgedError, match=reason):
        checked(aten.mm.default, *tensors)


def test_large_matrices_are_converted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = drawn("normal", 3, 50, 40).float(), drawn("normal", 3, 40, 30, seed=1).float()
    whole = only(aten.bmm.default, left, right).residual
    monkeypatch.setattr(matrices, "MOST_ELEMENTS", 500)

    parts = only(aten.bmm.default, left, right).residual

    assert torch.allclose(parts.rows, whole.rows, rtol=1e-6)
    assert float(parts.error) == pytest.approx(float(whole.error), rel=1e-6)


def test_no_random_number_of_the_training_is_drawn() -> None:
    before = torch.get_rng_state()
    only(aten.mm.default, torch.ones(4, 4), torch.ones(4, 4))

    assert torch.equal(torch.get_rng_state(), before)
