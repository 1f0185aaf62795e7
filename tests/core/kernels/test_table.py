"""Many tensors in one call have the summaries that each has by itself; rows of a step grow in one table."""

from __future__ import annotations

import ctypes
from array import array

import pytest
import torch

from traindiff.core.kernels import summarize
from traindiff.core.kernels.cpu.table import Table, is_one_stretch
from traindiff.core.kernels.registry import WORDS
from traindiff.core.kernels.rows import Rows, is_late, resolved
from traindiff.core.kernels.torch_arrays import dtype_name
from traindiff.core.shards import Shard
from traindiff.core.summary import empty
from traindiff.core.torch_compat.alike import looks_like
from traindiff.observe.torch.hooks.marks import Marks, mark_of


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(8, 8),
        torch.randn(3, dtype=torch.float64),
        torch.randn(1000).bfloat16(),
        torch.tensor(3),
        torch.tensor(float("nan")),
        torch.randn(5, 700).half(),
        torch.tensor([True, False]),
    ]


def test_a_table_gives_the_summaries_of_its_tensors() -> None:
    given = tensors()
    shards = [Shard.whole(tuple(one.shape)) for one in given]
    rows: list[tuple[str, Shard] | None] = [(dtype_name(one), of) for one, of in zip(given, shards, strict=True)]
    rows[2] = None
    found = empty(len(given))
    addresses = array("Q", [one.data_ptr() for one in given])
    Table(rows).summarize(addresses, found.ctypes.data)
    for place, (one, of) in enumerate(zip(given, shards, strict=True)):
        expected = empty() if place == 2 else summarize(one, of)
        assert found[place].tobytes() == expected.tobytes()


def test_what_is_empty_or_has_gaps_is_not_one_stretch() -> None:
    assert is_one_stretch(Shard.whole((2, 3)))
    assert not is_one_stretch(Shard.whole((0, 3)))
    assert not is_one_stretch(Shard(shape=(2, 2), global_shape=(2, 3), offset=(0, 0)))


@pytest.mark.parametrize("expected", [0, 3, 10_000])
def test_rows_keep_their_order_however_they_come(expected: int) -> None:
    rows, made, places = Rows(expected), list[int](), list[int]()
    for number in range(200):
        if number % 7:
            one = empty()
            one["count"] = number
            places.append(rows.append(one[()]))
            made.append(number)
        else:
            many = empty(number)
            many["count"] = range(number)
            address = rows.place(number)
            places += [address + row * many.itemsize for row in range(number)]
            ctypes.memmove(address, many.ctypes.data, many.nbytes)
            made += range(number)
    taken = rows.taken(places)
    assert len(taken) == len(made)
    assert resolved(taken)["count"].tolist() == made
    assert [int(one["count"]) for one in taken] == made
    assert int(taken[150]["count"]) == made[150]
    assert not is_late(taken)
    assert resolved(rows.taken(places[::-2]))["count"].tolist() == made[::-2]


def test_tensors_look_alike_only_if_everything_but_their_numbers_is_the_same() -> None:
    model = torch.randn(4, 3)
    looks = looks_like([model])
    assert looks is not None
    assert looks([torch.zeros(4, 3)])
    others = [
        torch.randn(3, 4), torch.randn(3, 4).t(), model.double(), torch.nn.Parameter(model),
        model.clone().requires_grad_(), torch.empty(4, 3, device="meta"), model.to_sparse(), torch._neg_view(model),
        None, 1,
    ]  # fmt: skip
    assert [looks([one]) for one in others] == [False] * len(others)
    assert not looks([])
    assert not looks([model, model])


def test_marks_of_many_tensors_are_those_of_each() -> None:
    assert WORDS.load() is not None
    given = [*tensors(), torch.randn(40_001), torch.randn(4096 // 4), torch.randn(4096 // 4 + 1), torch.empty(0)]
    marks = Marks()
    marks.take_all([(one, ()) for one in given])
    assert marks._together is not None
    assert marks._together.parts(marks._marks) == [mark_of(one) for one in given]
