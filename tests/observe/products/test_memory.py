"""Marks of what operators return: a bit that flips in memory is seen, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from traindiff.observe.torch.products.memory import Flip, Memory


def flip(tensor: Tensor, place: int, bit: int) -> None:
    """Flip a bit as hardware does: no counter of writes sees it."""
    bits = tensor.numpy().reshape(-1).view(np.uint32)
    bits[place] ^= np.uint32(1 << bit)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(20,), (40, 60), (3, 7, 100)], ids=str)
def test_a_flip_between_two_operators_is_seen_once(shape: tuple[int, ...]) -> None:
    memory, tensor = Memory(), drawn(*shape)
    memory.take([tensor], "maker")
    flip(tensor, 7, 13)

    assert list(memory.read([tensor.view(shape)], "reader")) == [Flip("maker", True, 13)]
    assert list(memory.read([tensor], "reader")) == []


def test_what_no_operator_returned_is_marked_when_it_is_first_read() -> None:
    memory, tensor = Memory(), drawn(30)

    assert list(memory.read([tensor], "first")) == []
    flip(tensor, 3, 30)
    assert list(memory.read([tensor], "second")) == [Flip("first", False, 30)]


def test_what_the_training_still_holds_is_looked_at_again() -> None:
    memory, tensor = Memory(), drawn(30)
    memory.take([tensor, drawn(40)], "maker")  # of the second one nothing is left
    flip(tensor, 3, 2)

    assert list(memory.read_living()) == [Flip("maker", True, 2)]


def replaced(tensor: Tensor) -> Tensor:
    tensor.data.copy_(drawn(31)[1:])
    return tensor


LEGAL: dict[str, Callable[[Tensor], Tensor]] = {
    "a write that is counted": lambda x: x.mul_(2.0),
    "one element that is written": lambda x: x.index_fill_(0, torch.tensor([3]), 0.0),
    "a write through data": replaced,
    "nothing": lambda x: x,
    "another view": lambda x: x.view(5, 6),
}


@pytest.mark.parametrize("name", LEGAL)
def test_writes_are_no_flips(name: str) -> None:
    memory, tensor = Memory(), drawn(30)
    memory.take([tensor], "maker")

    assert list(memory.read([LEGAL[name](tensor)], "reader")) == []


def test_a_tensor_of_few_numbers_is_not_judged() -> None:
    memory, tensor = Memory(), torch.zeros(30)
    tensor[:3] = 1.0
    memory.take([tensor], "maker")
    tensor.data[0] *= 2.0  # a bit of the exponent

    assert list(memory.read([tensor], "reader")) == []


def test_nothing_is_known_of_other_tensors() -> None:
    memory = Memory()
    others = [torch.arange(30), torch.ones(30, device="meta"), torch.ones(30).to_sparse()]
    memory.take(others, "maker")

    assert list(memory.read(others, "reader")) == []


def test_memory_that_an_engine_has_freed_is_not_read() -> None:
    memory, tensor = Memory(), drawn(5000)
    memory.take([tensor], "maker")
    tensor.untyped_storage().resize_(0)

    assert list(memory.read_living()) == []
