"""MindSpore's tensors as arrays."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

from traindiff.core.kernels.cpu import arrays
from traindiff.core.kernels.reference import summarize_array
from traindiff.core.shards import Shard
from traindiff.errors import UnsupportedTensorError
from traindiff.observe.mindspore.observations import as_real, elements, read

VALUES = np.array([[1.5, -0.25, 0.0], [3.0, -np.inf, np.nan]], dtype=np.float32)


def test_bfloat16_has_the_bits_that_it_has_in_memory() -> None:
    found = elements(read(Tensor(VALUES, mindspore.bfloat16)))

    assert found.bits.dtype == np.uint16
    assert found.bits[:4].tolist() == [0x3FC0, 0xBE80, 0x0000, 0x4040]
    np.testing.assert_array_equal(found.values, VALUES.reshape(-1))
    assert found.tiny == 2.0**-126


@pytest.mark.parametrize("dtype", [mindspore.float16, mindspore.float32, mindspore.float64])
def test_floating_point_numbers_are_read_where_they_are(dtype: mindspore.Type) -> None:
    found = elements(read(Tensor(VALUES, dtype)))

    np.testing.assert_array_equal(found.values, VALUES.reshape(-1).astype(found.values.dtype))
    np.testing.assert_array_equal(found.bits.view(found.values.dtype), found.values)
    assert found.tiny == np.finfo(found.values.dtype).smallest_normal


def test_whole_numbers_and_truth_values_have_no_fractions() -> None:
    assert elements(read(Tensor(np.array([3, -1]), mindspore.int32))).tiny == 0.0
    assert elements(read(Tensor(np.array([True, False])))).values.tolist() == [1, 0]


def test_complex_numbers_get_an_axis_of_real_and_imaginary_part() -> None:
    found = as_real(read(Tensor(np.array([1 + 2j, 3 - 1j], dtype=np.complex64))))

    assert found.dtype == np.float32
    assert found.tolist() == [[1.0, 2.0], [3.0, -1.0]]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16", "int32", "bool_"])
def test_a_tensor_of_any_dtype_is_summarized_by_the_compiled_kernel(dtype: str) -> None:
    array = read(Tensor(VALUES.clip(-4, 4), getattr(mindspore, dtype)))
    found = elements(array)
    shard = Shard.whole(array.shape)

    assert arrays.reads(array)
    summary = arrays.summarize(array, shard)
    expected = summarize_array(found.values, found.bits, shard, tiny=found.tiny)
    for name in ("count", "nan", "zero", "negative", "minimum", "maximum", "fingerprint", "multiset"):
        assert summary[name] == expected[name]
    np.testing.assert_allclose(summary["sketch"], expected["sketch"], rtol=1e-12)


def test_what_is_no_tensor_is_not_read() -> None:
    with pytest.raises(UnsupportedTensorError, match="a list has no dense elements"):
        read([1.0])
    with pytest.raises(UnsupportedTensorError, match="dtype str32 is not supported"):
        elements(np.array(["a"]))
