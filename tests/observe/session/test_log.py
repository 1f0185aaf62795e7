"""Scalars that the training reports."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

import traindiff
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import row, rows
from tests.observe.hooks.trainings import batches


def logged(path: Path, name: str = "value") -> list[tuple[int, int, float]]:
    found = rows(path, phase="loss", path=name, slot="logged")
    return [(seen.step, seen.micro_step, float(summary["sum"])) for seen, summary in found]


def test_a_scalar_belongs_to_the_step_in_which_it_is_logged(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True) as run:
        run.log("early", 0.5)
        for batch in batches(3):
            loss = model(batch).square().mean()
            run.log("value", run.step)
            loss.backward()
            optimizer.step()

    assert logged(tmp_path / "run") == [(0, 0, 0.0), (1, 0, 1.0), (2, 0, 2.0)]
    assert logged(tmp_path / "run", "early") == [(0, 0, 0.5)]


def test_after_the_step_of_the_optimizer_it_belongs_to_the_step_that_has_just_ended(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True) as run:
        for batch in batches(3):
            model(batch).square().mean().backward()
            optimizer.step()
            run.log("value", run.step - 1)

    assert logged(tmp_path / "run") == [(0, 0, 0.0), (1, 0, 1.0), (2, 0, 2.0)]
    seen, _ = row(tmp_path / "run", path="value", step=1)
    assert seen.order == max(one.order for one, _ in rows(tmp_path / "run", step=1))


def test_after_the_step_it_still_finds_its_step_with_several_optimizers(tmp_path: Path) -> None:
    model = mlp()
    first, second = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, [first, second], strict=True) as run:
        for batch in batches(3):
            model(batch).square().mean().backward()
            first.step()
            second.step()
            run.log("value", run.step - 1)

    assert logged(tmp_path / "run") == [(0, 0, 0.0), (1, 0, 1.0), (2, 0, 2.0)]


def test_scalars_of_micro_batches_are_a_mean_weighted_by_samples(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True) as run:
        for part in next(batches()).split([4, 2]):
            loss = model(part).square().mean()
            run.log("value", loss)
            loss.backward()
        run.log("tokens", 12, merge="sum")
        run.log("accuracy", 0.5, weight=7)
        optimizer.step()

    found = [seen for seen, _ in rows(tmp_path / "run", path="value")]
    assert [(seen.micro_step, seen.merge, seen.weight) for seen in found] == [(0, "mean", 4.0), (1, "mean", 2.0)]
    assert row(tmp_path / "run", path="tokens")[0].merge == "sum"
    assert row(tmp_path / "run", path="accuracy")[0].weight == 7


def test_a_name_that_is_logged_again_is_numbered(tmp_path: Path) -> None:
    with traindiff.record(tmp_path / "run", mlp(), strict=True) as run:
        run.log("value", 1.0)
        run.log("value", 2.0)

    assert [seen.call for seen, _ in rows(tmp_path / "run", path="value")] == [0, 1]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (2.5, "float64"),
        (True, "float64"),
        (torch.tensor(2.5), "float32"),
        (torch.tensor([[2.5]], dtype=torch.bfloat16), "bfloat16"),
        (torch.tensor(2.5, requires_grad=True), "float32"),
    ],
)
def test_numbers_and_tensors_of_one_element_can_be_logged(
    value: float | torch.Tensor, dtype: str, tmp_path: Path
) -> None:
    with traindiff.record(tmp_path / "run", mlp(), strict=True) as run:
        run.log("value", value)

    seen, summary = row(tmp_path / "run", path="value")
    assert (seen.dtype, seen.shard.shape, float(summary["maximum"])) == (dtype, (), 1.0 if value is True else 2.5)


def test_a_number_that_is_none_is_recorded_as_such(tmp_path: Path) -> None:
    with traindiff.record(tmp_path / "run", mlp(), strict=True) as run:
        run.log("value", math.nan)

    assert row(tmp_path / "run", path="value")[1]["nan"] == 1


def test_scalars_of_steps_that_are_not_recorded_are_left_out(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, every=2, strict=True) as run:
        for batch in batches(5):
            model(batch).square().mean().backward()
            run.log("inside", 1.0)
            optimizer.step()
            run.log("value", 1.0)

    assert [step for step, _, _ in logged(tmp_path / "run")] == [0, 2, 4]
    assert [step for step, _, _ in logged(tmp_path / "run", "inside")] == [0, 2, 4]


def test_an_unknown_way_to_merge_is_refused(tmp_path: Path) -> None:
    with (
        traindiff.record(tmp_path / "run", mlp()) as run,
        pytest.raises(traindiff.ConfigError) as caught,
    ):
        run.log("loss", 1.0, merge="avg")

    assert str(caught.value) == (
        "1 problem in log(...); the value was not recorded.\n"
        "\n"
        "  log('loss', merge=...)\n"
        '    "avg" is not a way to merge.\n'
        "    Known: mean, sum."
    )
