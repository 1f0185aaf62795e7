"""Pipelines of `torch.distributed.pipelining` against one process that runs the whole model on the whole batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import traindiff
from tests.observe.sharding.pipelined import train_pipelined, train_whole
from tests.on_ranks import RanksError, run_on_ranks
from traindiff.analyse.compare.verdict import Comparison
from traindiff.analyse.findings import Finding

WITH_MICRO = ("batch", "forward", "loss", "backward", "grad", "grad.micro", "optimizer", "update", "param")

Trainings = dict[str, dict[str, Any]]

CORRECT: dict[int, Trainings] = {
    2: {
        "gpipe": {"observe": WITH_MICRO},
        "1f1b": {"schedule": "1f1b", "dtype": torch.bfloat16},
        "two stages per rank": {"schedule": "interleaved"},
        "backward passes in two halves": {"schedule": "zero bubble"},
        "gradients that are not scaled": {"scale_grads": False},
        "tied": {"tied": True, "observe": WITH_MICRO},
        "traced": {"schedule": "traced"},
        "a group that one stage lacks": {"grouped": True},
    },
    4: {
        "gpipe": {"dtype": torch.bfloat16},
        "1f1b": {"schedule": "1f1b"},
        "two pipelines": {"pipelines": 2},
        "two pipelines in DDP": {"pipelines": 2, "wrap": "ddp", "schedule": "1f1b"},
        "two pipelines in FSDP2": {"pipelines": 2, "wrap": "fsdp"},
        "tensor parallel": {"pipelines": 2, "wrap": "tensor parallel"},
    },
}


def train_several(directory: str, trainings: Trainings) -> dict[str, list[float]]:
    """Several trainings in the same processes, one after the other."""
    before = PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk, Schedule1F1B._initialize_stage
    sums = {name: train_pipelined(f"{directory}/{name}", **settings) for name, settings in trainings.items()}
    after = PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk, Schedule1F1B._initialize_stage
    assert before == after, "a method stayed replaced"
    return sums


def reference(path: Path, settings: dict[str, Any]) -> Path:
    """One process that trains the same."""
    if not path.exists():
        train_whole(
            path, **{name: settings[name] for name in ("dtype", "observe", "tied", "grouped") if name in settings}
        )
    return path


@pytest.fixture(scope="module", params=CORRECT)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    directory = tmp_path_factory.mktemp("pipelines")
    trainings = {**CORRECT[request.param], "alone": {"schedule": "1f1b", "dtype": torch.bfloat16, "record": False}}
    for sums in run_on_ranks(train_several, request.param, str(directory), trainings):
        if request.param == 2:
            assert sums["1f1b"] == sums["alone"], "recording disturbs the training"
    return request.param, directory


def test_pipelines_are_equivalent_to_one_process(recorded: tuple[int, Path]) -> None:
    world_size, directory = recorded
    for name, settings in CORRECT[world_size].items():
        comparison = traindiff.compare(reference(directory / f"whole {name}", settings), directory / name)

        assert comparison.verdict == "equivalent", f"{name}: {comparison}"
        assert not any(comparison.unaligned)
        assert {row.phase for row in comparison.differences} >= {
            "batch", "forward", "loss", "backward", "grad", "optimizer", "update", "param",
        }  # fmt: skip


def test_the_recording_says_which_stages_a_rank_has(recorded: tuple[int, Path]) -> None:
    world_size, directory = recorded
    run = json.loads((directory / "1f1b" / "run.json").read_text())
    last = json.loads((directory / "1f1b" / f"rank-{world_size - 1:05d}" / "rank.json").read_text())

    assert run["mesh"] == {
        "data_parallel": 1, "engine": "pipeline", "pipeline": world_size, "schedule": "Schedule1F1B",
        "micro_batches": 4, "scales_gradients": True,
    }  # fmt: skip
    assert last["pipeline"] == {
        "num_stages": world_size, "stages": [world_size - 1], "ranks": list(range(world_size)),
    }  # fmt: skip


def test_a_pipeline_is_read_in_the_order_of_the_whole_model(recorded: tuple[int, Path]) -> None:
    """First divergences are the first in the order of the baseline, which may be a pipeline."""
    _, directory = recorded
    comparison = traindiff.compare(directory / "1f1b", directory / "1f1b")
    forward = [row.path for row in comparison.differences if row.phase == "forward" and row.path.startswith("blocks.")]
    backward = [row.path for row in comparison.differences if row.phase == "backward" and row.path.endswith(".down")]
    phases = list(dict.fromkeys(row.phase for row in comparison.differences if row.phase in ("forward", "backward")))

    assert comparison.verdict == "identical"
    assert forward == sorted(forward, key=lambda path: path.split(".")[1])
    assert backward == [f"blocks.{number}.down" for number in (3, 2, 1, 0)]
    assert phases == ["forward", "backward"]


def scale_twice(part: nn.Module) -> None:
    """The gradients of stage 1 are divided by the number of micro-batches once too often."""
    if torch.distributed.get_rank() == 1:
        for parameter in part.parameters():
            parameter.grad /= 4


def drop_a_micro_batch(_schedule: Any, stage: PipelineStage) -> None:
    """What the third micro-batch brings to the gradients of stage 1 is lost."""

    def backward_one_chunk(number: int, *args: Any, **kwargs: Any) -> None:
        before = [None if p.grad is None else p.grad.clone() for p in stage.submod.parameters()]
        PipelineStage.backward_one_chunk(stage, number, *args, **kwargs)
        if number == 2 and stage.stage_index == 1:
            for parameter, gradient in zip(stage.submod.parameters(), before, strict=True):
                parameter.grad = gradient

    stage.backward_one_chunk = backward_one_chunk


def round_what_is_sent(_schedule: Any, stage: PipelineStage) -> None:
    """Activations are sent in bfloat16."""
    original = stage.get_fwd_send_ops

    def get_fwd_send_ops(number: int) -> list[Any]:
        operations = original(number)
        for operation in operations:
            operation.tensor = operation.tensor.detach().bfloat16().float()
        return operations

    stage.get_fwd_send_ops = get_fwd_send_ops


def read_a_stale_buffer(_schedule: Any, stage: PipelineStage) -> None:
    """The third micro-batch is computed from what was received for the second."""
    original = stage._retrieve_recv_activations

    def retrieve(number: int) -> tuple[torch.Tensor, ...]:
        found = original(number)
        if number == 2:
            for tensor, earlier in zip(found, original(1), strict=True):
                tensor.data.copy_(earlier.data)
        return found

    stage._retrieve_recv_activations = retrieve


def spoil_gradients_on_their_way(_schedule: Any, stage: PipelineStage) -> None:
    """Stage 0 receives gradients of which every element is a tenth too large."""
    original = stage._retrieve_recv_grads
    stage._retrieve_recv_grads = lambda number: tuple(one * 1.1 for one in original(number))


FAULTY: Trainings = {
    "scaled twice": {"before_step": scale_twice},
    "dropped": {"spoil": drop_a_micro_batch, "observe": WITH_MICRO},
    "rounded": {"spoil": round_what_is_sent},
    "stale": {"spoil": read_a_stale_buffer, "schedule": "1f1b"},
    "gradients": {"spoil": spoil_gradients_on_their_way},
    "not reduced": {"tied": True, "reduce_tied": False},
    "nothing": {},
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faulty")
    run_on_ranks(train_several, 2, str(directory), FAULTY)
    return directory


def compared(directory: Path, name: str) -> tuple[Comparison, Finding]:
    comparison = traindiff.compare(reference(directory / f"whole {name}", FAULTY[name]), directory / name)
    assert comparison.verdict == "diverged", str(comparison)
    assert comparison.first_divergence is not None
    return comparison, comparison.first_divergence


def test_gradients_of_a_stage_that_are_scaled_twice(faulty: Path) -> None:
    comparison, first = compared(faulty, "scaled twice")

    assert (first.kind, first.step, first.phase, first.path.split(".")[1]) == ("scale", 0, "grad", "2"), str(comparison)
    assert first.rank == 1
    assert "0.25 x the baseline's (= 1/4, one over its micro-batches: divided once too often?)" in first.message


def test_a_micro_batch_that_is_dropped_from_the_gradient(faulty: Path) -> None:
    comparison, first = compared(faulty, "dropped")

    assert (first.kind, first.step, first.micro_step, first.rank) == ("lost-contribution", 0, 2, 1), str(comparison)
    assert first.path.startswith("blocks.2.")
    assert "lacks what micro-step 2 of 4 contributed" in first.message


def test_activations_that_are_sent_in_a_shorter_dtype(faulty: Path) -> None:
    comparison, first = compared(faulty, "rounded")

    assert (first.kind, first.step, first.phase, first.path, first.rank) == (
        "boundary", 0, "forward", "blocks.2.norm", 1,
    ), str(comparison)  # fmt: skip
    assert "In the candidate, stage 1 (rank 1) received something else than stage 0 (rank 0) sent" in first.message
    assert "as rounding to bfloat16 would make it" in first.message


def test_a_buffer_that_is_read_before_it_is_filled(faulty: Path) -> None:
    comparison, first = compared(faulty, "stale")

    assert (first.kind, first.step, first.micro_step, first.path) == (
        "boundary", 0, 2, "blocks.2.norm",
    ), str(comparison)  # fmt: skip
    assert "what it sent in micro-step 1. Was a buffer read before it was filled?" in first.message


def test_gradients_that_arrive_as_something_else(faulty: Path) -> None:
    comparison, first = compared(faulty, "gradients")

    assert (first.kind, first.step, first.phase, first.path, first.rank) == (
        "boundary", 0, "backward", "blocks.1", 0,
    ), str(comparison)  # fmt: skip
    assert "stage 0 (rank 0) received something else than the gradient that stage 1 (rank 1) sent" in first.message


def test_a_tied_gradient_that_is_not_added_up_over_its_stages(faulty: Path) -> None:
    comparison, first = compared(faulty, "not reduced")

    assert (first.kind, first.step, first.phase, first.path) == (
        "ranks-disagree", 0, "grad", "embed.weight",
    ), str(comparison)  # fmt: skip
    assert "rank 1 calls it head.weight" in first.message


def test_a_stage_that_left_no_recording_is_named_and_the_rest_is_compared(faulty: Path, tmp_path: Path) -> None:
    shutil.copytree(faulty / "nothing", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "rank-00001")

    comparison = traindiff.compare(reference(faulty / "whole scaled twice", {}), tmp_path / "run")

    assert comparison.verdict == "incomplete", str(comparison)
    assert any("rank 1 left no recording. Not recorded, so not compared: stage 1" in note for note in comparison.notes)
    missing = {(one.phase, one.path) for one in comparison.unaligned[0]}
    assert {("forward", "blocks.2.up"), ("grad", "head.weight"), ("loss", "loss"), ("forward", "")} <= missing
    assert {("forward", "blocks.1"), ("backward", "embed"), ("grad", "embed.weight")} <= {
        (row.phase, row.path) for row in comparison.differences
    }


def train_unevenly(path: str) -> None:
    train_pipelined(path, size=6)


def test_micro_batches_that_are_not_equally_long_fail_as_they_do_without_recording(tmp_path: Path) -> None:
    """The receiving stage has buffers of one size. What it computes from them does not fit the labels."""
    with pytest.raises(RanksError, match=r"Expected input batch_size \(12\) to match target batch_size \(6\)"):
        run_on_ranks(train_unevenly, 2, str(tmp_path / "run"), timeout_seconds=20)

    comparison = traindiff.compare(reference(tmp_path / "whole", {}), tmp_path / "run")

    assert comparison.verdict == "incomplete", str(comparison)
    assert any("has no finished step" in note for note in comparison.notes)
