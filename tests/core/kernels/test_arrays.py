"""The kernel for NumPy arrays gives what the kernel for tensors gives."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.core.kernels.oracle import FORMATS
from tests.core.kernels.tensors import Case, cases
from tests.core.kernels.test_parts import held
from traindiff.core.kernels import summarize, summarize_array
from traindiff.core.kernels.element_details import Elements
from traindiff.core.shards import Shard
from traindiff.core.summary import SUMMARY

arrays = pytest.importorskip("traindiff.core.kernels.cpu.arrays")

OF_NUMPY = tuple(name for name in FORMATS if hasattr(np, name) or name == "bool")


def no_reference() -> Elements:
    raise AssertionError("the reference was asked for")


@settings(max_examples=100)
@given(cases(OF_NUMPY))
def test_an_array_has_the_summary_of_the_tensor_with_its_elements(case: Case) -> None:
    tensor = case.tensor.contiguous()
    shard = Shard.whole(case.shape)

    found = summarize_array(tensor.numpy(), shard, no_reference)

    assert found.tobytes() == summarize(tensor, shard).tobytes()


@given(held())
def test_an_array_may_be_a_part_of_any_kind(given_: tuple[torch.Tensor, Shard]) -> None:
    tensor, shard = given_
    tensor = tensor.contiguous() if tensor.shape == shard.shape else tensor.reshape(-1).contiguous()

    found = summarize_array(tensor.numpy(), shard, no_reference)

    assert found.tobytes() == summarize(tensor, shard).tobytes()


def test_what_no_kernel_reads_is_given_to_the_reference() -> None:
    values = np.arange(4, dtype=np.uint32)
    for array in (values, np.arange(8, dtype=np.float32)[::2], np.arange(4, dtype=">f4")):
        assert not arrays.reads(array)

    found = summarize_array(values, Shard.whole((4,)), lambda: Elements(values=values, bits=values, tiny=0.0))

    assert (found["count"], found["maximum"], found["zero"]) == (4, 3.0, 1)


def test_several_threads_summarize_at_once() -> None:
    """Also the first summary of a dtype, whose code is built once: two engines of it would free each other's code."""
    found: list[np.void] = []
    values = np.arange(1 << 16, dtype=np.float16)

    def several() -> None:
        found.extend(summarize_array(values, Shard.whole(values.shape), no_reference) for _ in range(20))

    threads = [threading.Thread(target=several) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 80
    assert len({one.tobytes() for one in found}) == 1
    assert found[0].dtype == SUMMARY
