"""Micro-batches are parts of the step's batch, wherever its axis is."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import traindiff
from tests.core.kernels.rounding import assert_equal_up_to_rounding
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import Row, row, rows
from tests.observe.hooks.trainings import batches
from traindiff.core.shards import OPEN, Shard
from traindiff.core.summary import SUMMARY, distance, merge, norm
from traindiff.errors import TraindiffWarning
from traindiff.observe.common.batch_axis import BatchAxis
from traindiff.observe.common.progress import Batch, Progress

SITE = ("site",)


def record_step(path: Path, model: nn.Module, parts: list[Tensor], **options: Any) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    total = sum(part.numel() for part in parts)
    with traindiff.record(path, model, optimizer, strict=True, **options):
        for part in parts:
            (model(part).square().sum() / total).backward()
        optimizer.step()


def merged(directory: Path, **where: Any) -> tuple[set[int], np.void]:
    """Lengths of the batch that a site's parts make up, and the summary of it."""
    found: list[Row] = rows(directory, **where)
    assert all(seen.merge == "shard" and seen.shard.batched for seen, _ in found)
    return {sum(seen.shard.shape[0] for seen, _ in found)}, merge(np.array([s for _, s in found], dtype=SUMMARY))


SPLITS = {"even": [4, 4, 4], "uneven": [5, 1, 6], "single": [1] * 12}


@pytest.mark.parametrize("split", SPLITS)
def test_inputs_of_micro_batches_merge_to_exactly_those_of_the_batch(split: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = mlp(), torch.randn(12, 8)
    record_step(tmp_path / "whole", model, [batch])
    record_step(tmp_path / "parts", model, list(batch.split(SPLITS[split])))

    length, actual = merged(tmp_path / "parts", phase="batch", path="")
    expected_length, expected = merged(tmp_path / "whole", phase="batch", path="")

    assert length == expected_length == {12}
    assert actual["fingerprint"] == expected["fingerprint"]
    assert_equal_up_to_rounding(actual, expected)


@pytest.mark.parametrize("split", SPLITS)
def test_activations_of_micro_batches_merge_to_those_of_the_batch_up_to_rounding(split: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = torch.randn(12, 8)
    for name, parts in (("whole", [batch]), ("parts", list(batch.split(SPLITS[split])))):
        torch.manual_seed(1)
        record_step(tmp_path / name, mlp(), parts)

    for phase, path in product(("forward", "backward"), ("0", "1", "2", "")):
        length, actual = merged(tmp_path / "parts", phase=phase, path=path)
        expected_length, expected = merged(tmp_path / "whole", phase=phase, path=path)
        assert length == expected_length == {12}
        assert actual["count"] == expected["count"]
        assert distance(actual, expected) <= 1e-6 * norm(expected)
        np.testing.assert_allclose(actual["row_squares"], expected["row_squares"], rtol=1e-5)
        np.testing.assert_allclose(actual["column_squares"], expected["column_squares"], rtol=1e-5)


def test_a_loss_inside_the_model_is_a_term_of_a_mean_over_its_samples(tmp_path: Path) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).square().mean()

    torch.manual_seed(0)
    record_step(tmp_path / "run", WithLoss(), list(torch.randn(6, 8).split([4, 2])))

    found = rows(tmp_path / "run", phase="forward", path="")
    assert [(seen.merge, seen.weight, seen.micro_step) for seen, _ in found] == [("mean", 4.0, 0), ("mean", 2.0, 1)]
    gradients = rows(tmp_path / "run", phase="backward", path="")
    assert [seen.merge for seen, _ in gradients] == ["sum", "sum"]


def test_calls_of_a_module_count_their_rows_apart(tmp_path: Path) -> None:
    shared = nn.Linear(8, 8)
    record_step(tmp_path / "run", nn.Sequential(shared, nn.ReLU(), shared), list(torch.randn(6, 8).split([4, 2])))

    found = rows(tmp_path / "run", phase="forward", path="0")
    assert [(seen.micro_step, seen.call, seen.shard.offset[0]) for seen, _ in found] == [
        (0, 0, 0), (0, 1, 0), (1, 0, 4), (1, 1, 4),
    ]  # fmt: skip


def test_every_step_begins_at_the_first_row(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for _ in range(2):
            for part in torch.randn(6, 8).split(3):
                model(part).sum().backward()
            optimizer.step()

    assert [seen.shard.offset[0] for seen, _ in rows(tmp_path / "run", phase="forward", path="0")] == [0, 3, 0, 3]


def test_a_recording_with_the_batch_axis_in_second_place_has_it_in_front(tmp_path: Path) -> None:
    model = nn.LSTM(8, 5)  # sequence first
    optimizer = SGD(model.parameters(), lr=0.1)
    batch = torch.randn(7, 4, 8)
    with traindiff.record(tmp_path / "run", model, optimizer, batch_axis=1, strict=True):
        for part in batch.split([3, 1], dim=1):
            model(part)[0].sum().backward()
        optimizer.step()

    found = rows(tmp_path / "run", phase="batch", path="")
    assert [(seen.shard.shape, seen.shard.global_shape, seen.shard.offset) for seen, _ in found] == [
        ((3, 7, 8), (OPEN, 7, 8), (0, 0, 0)), ((1, 7, 8), (OPEN, 7, 8), (3, 0, 0)),
    ]  # fmt: skip
    transposed = nn.Identity()
    with traindiff.record(tmp_path / "expected", transposed, strict=True):
        transposed(batch.transpose(0, 1))
    _, actual = merged(tmp_path / "run", phase="batch", path="")
    assert actual["fingerprint"] == row(tmp_path / "expected", phase="batch", path="")[1]["fingerprint"]
    assert {seen.shard.shape[0] for seen, _ in rows(tmp_path / "run", phase="backward", slot="output[0]")} == {3, 1}


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reads = nn.LSTM(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.reads(x if self.reads.batch_first else x.transpose(0, 1))[0]
        return found


@pytest.mark.parametrize("length", [4, 9])
def test_a_recurrent_module_that_replaces_another_has_the_batch_where_it_says(length: int, tmp_path: Path) -> None:
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for step in range(6):
            if step in (2, 4):
                model.reads = nn.LSTM(3, 3, batch_first=step == 2)
                optimizer.param_groups[0]["params"] = [*model.parameters()]
            outputs = [model(batch) for batch in torch.ones(4, length, 3).split(2)]
            sum(one.sum() for one in outputs).backward()
            optimizer.step()

    found = [seen for seen, _ in rows(tmp_path / "run", phase="forward", path="reads", slot="output[0]")]
    assert [seen.shard.global_shape for seen in found] == [(-1, length, 3)] * 12


def progress(*lengths: int, size: int = 4) -> Progress:
    return Progress(batch=Batch(size=size, lengths=frozenset(lengths or {size})))


def split(tensor: Tensor, where: Progress, declared: dict[str, int | None] | None = None) -> tuple[int, Shard]:
    return BatchAxis(declared or {}).split(
        tuple(tensor.shape), path="encoder.0", slot="output[1][0]", site=SITE, progress=where
    )


def test_the_batch_is_as_long_as_axis_0_of_the_first_input_with_axes() -> None:
    inputs = [torch.tensor(1.0), torch.ones(4, 6), torch.ones(3)]

    assert BatchAxis({}).of_batch(tensor.shape for tensor in inputs) == Batch(size=4, lengths=frozenset({4, 24}))


def test_inputs_without_axes_are_no_batch() -> None:
    assert BatchAxis({}).of_batch([]) is None
    assert BatchAxis({}).of_batch([torch.tensor(1.0).shape]) is None
    assert BatchAxis({"*": 1}).of_batch([torch.ones(3).shape]) is None
    assert BatchAxis({"(root)": None}).of_batch([torch.ones(3, 4).shape]) is None


def test_a_declared_axis_of_the_root_gives_the_batch() -> None:
    expected = Batch(size=4, lengths=frozenset({4, 28}))

    assert BatchAxis({"*": 1}).of_batch([torch.ones(7, 4).shape]) == expected
    assert BatchAxis({"(root)": -1}).of_batch([torch.ones(7, 4).shape]) == expected


def test_a_batch_of_sequences_flattened_to_tokens_is_recognized() -> None:
    where = Progress(batch=BatchAxis({}).of_batch([torch.ones(4, 6, dtype=torch.int64).shape]))

    assert split(torch.ones(24, 5), where) == (0, Shard.of_batch((24, 5), first=0))
    assert split(torch.ones(24, 5), where) == (0, Shard.of_batch((24, 5), first=24))


def test_with_one_sample_a_position_table_is_not_taken_for_its_tokens() -> None:
    where = Progress(batch=BatchAxis({}).of_batch([torch.ones(1, 6, dtype=torch.int64).shape]))

    assert split(torch.ones(6, 5), where) == (0, Shard.whole((6, 5)))
    assert split(torch.ones(1, 5), where) == (0, Shard.of_batch((1, 5), first=0))


@pytest.mark.parametrize("batch_first", [False, True])
def test_inputs_and_outputs_of_a_recurrent_root_have_the_batch_where_it_says(*, batch_first: bool) -> None:
    axis = BatchAxis({}, {"": nn.LSTM(3, 3, batch_first=batch_first)})
    own = 0 if batch_first else 1
    slots = {"input[0]": own, "output[0]": own, "input[1][0]": 1, "output[1][0]": 1, "output[1][1]": 1}

    assert {slot: axis._usual_axis("", slot, 3) for slot in slots} == slots


@pytest.mark.parametrize("shape", [(6, 5), (5, 4), (), (8,), (0,)])
def test_a_tensor_of_another_length_is_whole(shape: tuple[int, ...]) -> None:
    where = Progress(batch=BatchAxis({}).of_batch([torch.ones(4, 6).shape]))

    assert split(torch.ones(shape), where) == (0, Shard.whole(shape))


def test_outside_of_any_batch_every_tensor_is_whole() -> None:
    assert split(torch.ones(4, 5), Progress()) == (0, Shard.whole((4, 5)))


@pytest.mark.parametrize(
    ("declared", "axis", "shape"),
    [
        ({"encoder.*": 1}, 1, (3, 5)),
        ({"encoder.*": -1}, -1, (3, 5)),
        ({"decoder.*": 1, "*": 0}, 0, (5, 3)),
        ({"encoder.0": 0, "*": 1}, 0, (5, 3)),  # the first pattern that matches
        ({"encoder.0 output[1][0]": 1}, 1, (3, 5)),  # path and slot
        ({"encoder.0 output[1][*": 1}, 1, (3, 5)),
        ({"encoder.0 output[0]": None, "encoder.*": 1}, 1, (3, 5)),  # another slot's
    ],
)
def test_a_declared_axis_is_taken_whatever_its_length(
    declared: dict[str, int | None], axis: int, shape: tuple[int, ...]
) -> None:
    found, shard = split(torch.ones(5, 3), progress(4), declared)

    assert (found, shard) == (axis, Shard.of_batch(shape, first=0))


def test_a_tensor_declared_to_have_no_batch_axis_is_whole() -> None:
    assert split(torch.ones(4, 5), progress(4), {"encoder.*": None}) == (0, Shard.whole((4, 5)))


def test_a_tensor_with_fewer_axes_than_declared_is_whole() -> None:
    assert split(torch.ones(4), progress(4), {"*": 1}) == (0, Shard.whole((4,)))


def test_patterns_and_none_hold_in_a_recording(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = SGD(model.parameters(), lr=0.1)
    axes = {"0": None, "1": 1}
    with traindiff.record(tmp_path / "run", model, optimizer, batch_axis=axes, strict=True):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()

    shapes = {path: row(tmp_path / "run", phase="forward", path=path)[0].shard.global_shape for path in ("0", "1", "")}
    assert shapes == {"0": (4, 8), "1": (OPEN, 4), "": (OPEN, 8)}


def test_a_declaration_that_nothing_obeys_is_warned_about(tmp_path: Path) -> None:
    model = mlp()
    with (
        pytest.warns(
            TraindiffWarning, match=r"record\(batch_axis=\.\.\.\): nothing that was observed matches 'decoder\.\*'"
        ),
        traindiff.record(tmp_path / "run", model, batch_axis={"0": 0, "decoder.*": 1}, strict=True),
    ):
        model(next(batches()))
