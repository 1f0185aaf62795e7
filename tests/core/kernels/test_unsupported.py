"""Tensors without dense elements are refused with the reason, in a few words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from traindiff.core.kernels import summarize
from traindiff.core.kernels.torch_arrays import shape_of
from traindiff.core.shards import Shard
from traindiff.errors import UnsupportedTensorError

pytestmark = pytest.mark.usefixtures("kernel")


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


CASES: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse_coo": (lambda: torch.eye(3).to_sparse(), "layout sparse_coo has no dense elements"),
    "sparse_csr": (lambda: torch.eye(3).to_sparse_csr(), "layout sparse_csr has no dense elements"),
    "quantized": (quantized, "quantized dtype qint8 is not supported"),
    "meta": (lambda: torch.ones(3, device="meta"), "a tensor on the meta device has no elements"),
    "nested": (lambda: nested(torch.strided), "a nested tensor has no dense elements"),
    "jagged": (lambda: nested(torch.jagged), "a nested tensor has no dense elements"),
    "lazy": (lambda: nn.LazyLinear(3).weight, "a lazy parameter has no elements before the first forward pass"),
    "fake": (fake, "a FakeTensor has no elements"),
    "float4": (lambda: torch.empty(4, dtype=torch.float4_e2m1fn_x2), "its elements cannot be read: "),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls most of these a prototype
def test_a_tensor_without_readable_elements_is_refused_with_the_reason(name: str) -> None:
    make, reason = CASES[name]
    tensor = make()

    with pytest.raises(UnsupportedTensorError) as caught:
        summarize(tensor, Shard.whole(shape_of(tensor)))

    assert str(caught.value).startswith(reason)
    assert "\n" not in str(caught.value)


def test_a_tensor_inside_a_transform_is_refused_with_the_reason() -> None:
    seen: list[str] = []

    def look(tensor: Tensor) -> Tensor:
        with pytest.raises(UnsupportedTensorError) as caught:
            summarize(tensor, Shard.whole(shape_of(tensor)))
        seen.append(str(caught.value))
        return tensor

    torch.vmap(look)(torch.ones(2, 3))

    assert seen[0].startswith("its elements cannot be read: ")
