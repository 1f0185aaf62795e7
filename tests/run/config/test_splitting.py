"""Batches are divided into equal parts of their samples, whatever they are made of."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from traindiff.errors import ConfigError
from traindiff.run.config.training import split

ROWS = torch.arange(12).reshape(6, 2)
Pair = namedtuple("Pair", ["inputs", "labels"])


@dataclass(frozen=True, kw_only=True)
class Batch:
    inputs: Tensor
    name: str


def parts(batch: Any, count: int = 3, **settings: Any) -> Any:
    return split(batch, count, where="recipe", asked_by="test", **settings)


def test_one_part_is_the_batch_itself() -> None:
    batch = object()

    assert parts(batch, 1)[0] is batch


@pytest.mark.parametrize(
    ("batch", "rows_of"),
    [
        (ROWS, lambda part: part),
        (ROWS.numpy(), lambda part: torch.from_numpy(part)),
        ((ROWS, "name"), lambda part: part[0]),
        ([1.5, [ROWS]], lambda part: part[1][0]),
        ({"inputs": ROWS, "weight": torch.tensor(2.0)}, lambda part: part["inputs"]),
        (Pair(ROWS, ROWS[:, 0]), lambda part: part.inputs),
        (Batch(inputs=ROWS, name="x"), lambda part: part.inputs),
    ],
    ids=["tensor", "array", "tuple", "nested list", "mapping", "named tuple", "dataclass"],
)
def test_the_rows_of_every_tensor_are_divided_in_order(batch: Any, rows_of: Any) -> None:
    found = parts(batch)

    assert [type(part) for part in found] == [type(batch)] * 3
    assert torch.equal(torch.cat([rows_of(part) for part in found]), ROWS)


def test_what_has_no_rows_is_the_same_in_every_part() -> None:
    found = parts(OrderedDict(inputs=ROWS, weight=torch.tensor(2.0), name="x"))

    assert {(part["weight"].item(), part["name"], type(part)) for part in found} == {(2.0, "x", OrderedDict)}


def test_parts_share_memory_with_the_batch() -> None:
    assert parts(ROWS)[1].data_ptr() == ROWS[2:].data_ptr()


def test_a_recipes_own_way_is_taken() -> None:
    def by(batch: range, count: int) -> list[range]:
        return [batch[number::count] for number in range(count)]

    assert parts(range(6), by=by) == [range(0, 6, 3), range(1, 6, 3), range(2, 6, 3)]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (7, "is an int without tensors, so that its samples cannot be told apart."),
        ((ROWS, np.zeros(5)), "has tensors with 5, 6 rows, so that its samples cannot be told apart."),
        (ROWS[:4], "has 4 samples, which cannot be divided into 3 equal parts (ranks x micro-batches)."),
    ],
)
def test_what_cannot_be_divided_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parts(batch)

    assert [problem.what for problem in caught.value.problems] == [message]


def test_a_recipes_own_way_must_give_as_many_parts_as_asked_for() -> None:
    with pytest.raises(ConfigError, match="returned 2 of a batch's parts when asked for 3"):
        parts(ROWS, by=lambda batch, count: [batch, batch])
