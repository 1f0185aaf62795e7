"""Tensors are found in whatever a module takes or returns, and named after where they are."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from traindiff.observe.torch.hooks.nested import tensors

A, B, C = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Output:
    logits: torch.Tensor
    more: dict[str, Any] = field(default_factory=dict)
    never_set: torch.Tensor = field(init=False)


class Unrelated:
    tensor = A


@pytest.mark.parametrize(
    ("value", "slots"),
    [
        (A, ["output[0]"]),
        ((A,), ["output[0]"]),  # the same name as alone
        ([A, B], ["output[0]", "output[1]"]),
        ({"logits": A, "hidden": (B, C)}, ["output.logits", "output.hidden[0]", "output.hidden[1]"]),
        ({"not a name": A, 3: B, (1, 2): C}, ["output['not a name']", "output[3]", "output[(1, 2)]"]),
        (OrderedDict(x=A), ["output.x"]),
        (Pair(A, [B]), ["output.first", "output.second[0]"]),
        (Output(A, {"b": B}), ["output.logits", "output.more.b"]),
        ((None, 3, "text", A, 2.5), ["output[3]"]),
        ((A, A), ["output[0]", "output[1]"]),
        (None, []),
        ("text", []),
        (Unrelated(), []),
        (Output, []),
        ((), []),
    ],
)
def test_every_tensor_is_found_and_named_after_its_place(value: Any, slots: list[str]) -> None:
    assert [slot for slot, _ in tensors(value, "output")] == slots


def test_tensors_come_in_the_order_of_the_container() -> None:
    found = [tensor for _, tensor in tensors({"a": B, "b": [A, {"c": C}]}, "output")]

    assert [id(tensor) for tensor in found] == [id(B), id(A), id(C)]


def test_a_container_that_holds_itself_ends() -> None:
    loop: list[Any] = [A]
    loop.append(loop)

    assert len(list(tensors(loop, "output"))) == 16


class Guarded:
    """An output of a module that counts how often it is asked for its length or its truth."""

    asked = 0

    def __len__(self) -> int:
        Guarded.asked += 1
        return 1

    def __bool__(self) -> bool:
        Guarded.asked += 1
        raise ValueError("ambiguous")


@pytest.mark.parametrize("value", [Guarded(), (Guarded(),), {"one": Guarded()}, [Guarded(), A]])
def test_an_object_is_asked_for_neither_its_length_nor_its_truth(value: Any) -> None:
    Guarded.asked = 0
    assert len(list(tensors(value, "output"))) == isinstance(value, list)
    assert Guarded.asked == 0
    assert list(tensors(np.arange(3), "output")) == []
