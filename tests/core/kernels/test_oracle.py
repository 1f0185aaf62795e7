"""Every kernel against the oracle, over dtypes, values and strides."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.core.kernels import oracle
from tests.core.kernels.rounding import assert_equal_up_to_rounding
from tests.core.kernels.tensors import Case, arrays, cases, from_bits
from traindiff.core.kernels import summarize
from traindiff.core.shards import Shard
from traindiff.core.summary import empty

pytestmark = pytest.mark.usefixtures("kernel")


def oracle_of_whole(case: Case) -> np.void:
    shape = case.shape
    rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, shape[0] if shape else 1)
    return oracle.summarize(case.bits, range(len(case.bits)), case.dtype, rows=rows, columns=columns)


@settings(max_examples=200)
@given(cases())
def test_a_summary_is_what_the_definitions_give(case: Case) -> None:
    actual = summarize(case.tensor, Shard.whole(case.shape))

    assert_equal_up_to_rounding(actual, oracle_of_whole(case))


@pytest.mark.parametrize("dtype", oracle.FORMATS)
def test_every_dtype_agrees_with_the_definitions_over_the_range_of_its_bit_patterns(dtype: str) -> None:
    form = oracle.FORMATS[dtype]
    top = 1 if dtype == "bool" else 2**form.width - 1
    patterns = sorted({number * top // 255 for number in range(256)})  # all of them for 8 bits
    bits = np.array(patterns, dtype=f"u{form.width // 8}")
    case = Case(tensor=from_bits(bits, dtype), bits=bits.tolist(), dtype=dtype)

    actual = summarize(case.tensor, Shard.whole(case.shape))

    assert_equal_up_to_rounding(actual, oracle_of_whole(case))


@given(cases())
def test_the_tensor_is_never_changed(case: Case) -> None:
    version, strides, pointer = case.tensor._version, case.tensor.stride(), case.tensor.data_ptr()

    summarize(case.tensor, Shard.whole(case.shape))

    after = [oracle.FORMATS[case.dtype].decode(bits) for bits in case.bits]
    np.testing.assert_array_equal(case.tensor.to(torch.float64).reshape(-1).numpy(), after)
    assert (case.tensor._version, case.tensor.stride(), case.tensor.data_ptr()) == (version, strides, pointer)


@given(arrays("float32", (5, 7, 2)))
def test_a_complex_tensor_is_a_real_one_with_a_last_axis(bits: np.ndarray) -> None:
    real = from_bits(bits, "float32")
    case = Case(tensor=real, bits=bits.reshape(-1).tolist(), dtype="float32")

    actual = summarize(torch.view_as_complex(real), Shard.whole((5, 7, 2)))

    assert_equal_up_to_rounding(actual, oracle_of_whole(case))


def lazily(change: str, values: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor whose conjugate or negative bit is set, and the same without."""
    if change == "conj":
        return values.conj(), values.conj().resolve_conj().clone()
    return values.conj().imag, values.conj().imag.resolve_neg().clone()


@pytest.mark.parametrize("change", ["conj", "neg"])
def test_a_lazily_conjugated_or_negated_tensor_has_the_summary_of_its_values(change: str) -> None:
    values = torch.complex(torch.arange(70.0), torch.arange(70.0) - 20)
    marked, plain = lazily(change, values)
    assert marked.is_conj() or marked.is_neg()
    shape = (70, 2) if change == "conj" else (70,)

    assert summarize(marked, Shard.whole(shape)) == summarize(plain, Shard.whole(shape))
    assert marked.is_conj() or marked.is_neg()


def test_a_tensor_that_requires_grad_keeps_its_graph() -> None:
    leaf = torch.randn(5, 5, requires_grad=True)
    grown = leaf * 2

    assert summarize(leaf, Shard.whole((5, 5))) == summarize(leaf.detach(), Shard.whole((5, 5)))
    assert summarize(grown, Shard.whole((5, 5))) == summarize(grown.detach(), Shard.whole((5, 5)))

    grown.sum().backward()
    assert torch.equal(leaf.grad, torch.full((5, 5), 2.0))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2)])
def test_an_empty_tensor_gives_the_neutral_summary(shape: tuple[int, ...]) -> None:
    assert summarize(torch.empty(shape), Shard.whole(shape)) == empty()


def test_a_tensor_of_many_chunks_agrees_with_the_definitions() -> None:
    values = torch.randn(2, 35_000, generator=torch.Generator().manual_seed(0))
    bits = values.view(torch.int32).reshape(-1).tolist()
    case = Case(tensor=values, bits=[one % 2**32 for one in bits], dtype="float32")

    assert_equal_up_to_rounding(summarize(values, Shard.whole((2, 35_000))), oracle_of_whole(case))


@pytest.mark.parametrize("dtype", oracle.FORMATS)
@pytest.mark.parametrize("first", [0, 37])
def test_every_dtype_agrees_with_the_definitions_over_many_blocks(dtype: str, first: int) -> None:
    form = oracle.FORMATS[dtype]
    top = 1 if dtype == "bool" else 2**form.width - 1
    drawn = np.random.default_rng(0).integers(0, top, 3_000, dtype=f"u{form.width // 8}", endpoint=True)
    shard = Shard(shape=(3_000,), global_shape=(5_000,), offset=(first,))

    actual = summarize(from_bits(drawn, dtype), shard)

    expected = oracle.summarize(drawn.tolist(), range(first, first + 3_000), dtype, rows=1, columns=5_000)
    assert_equal_up_to_rounding(actual, expected)


def test_a_byte_of_a_bool_other_than_0_is_true_and_enters_the_fingerprint_as_it_is() -> None:
    odd = torch.tensor([0, 1, 2, 255] * 30, dtype=torch.uint8).view(torch.bool)
    even = torch.tensor([0, 1, 1, 1] * 30, dtype=torch.uint8).view(torch.bool)

    actual, expected = (summarize(tensor, Shard.whole((120,))) for tensor in (odd, even))

    for name in ("zero", "negative", "minimum", "maximum", "smallest"):
        assert actual[name] == expected[name]
    assert actual["fingerprint"] != expected["fingerprint"]


@pytest.mark.parametrize(
    ("value", "name"), [(1e308, "sum"), (1e200, "sum_of_squares"), (1e308, "sketch"), (-1e308, "row_squares")]
)
def test_moments_that_overflow_float64_are_infinite_and_warn_nobody(value: float, name: str) -> None:
    values = torch.full((64 * 64,), value, dtype=torch.float64)

    summary = summarize(values, Shard.whole((64 * 64,)))

    assert not np.all(np.isfinite(summary[name]))
    assert summary["nan"] == summary["positive_infinity"] == 0
