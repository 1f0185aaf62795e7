"""Monitored trainings on several ranks: files of gradients that are whole, and made of shards of those that are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import traindiff
from tests.compat.msprobe.monitoring import configuration, directions, tables
from tests.observe.sharding.deepspeed_training import (
    NEEDS_DEEPSPEED,
    PARTITION_ALL,
    global_batches,
    make_engine,
    step_engine,
)
from tests.observe.sharding.test_data_parallel import fully_sharded, in_ddp
from tests.observe.sharding.test_fsdp1 import sharded
from tests.observe.sharding.training import BATCH, LENGTH, VOCABULARY, Model, adamw, rank_and_size
from tests.on_ranks import run_on_ranks
from traindiff.compat.msprobe import PrecisionDebugger
from traindiff.compat.msprobe.exporting import export_gradients

NAMES = {name for name, _ in Model().named_parameters()}


def monitored(config: str, prepare: Callable[[Model], nn.Module] = lambda model: model) -> list[str]:
    """Three monitored steps. Returns what stop() warned of."""
    torch.manual_seed(0)
    wrapped = prepare(Model())
    optimizer = adamw(wrapped.parameters())
    rank, size = rank_and_size()
    debugger = PrecisionDebugger(config)
    debugger.monitor(wrapped)
    data = torch.Generator().manual_seed(1)
    for _ in range(3):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data).chunk(size)[rank]
        logits = wrapped(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return stopped(debugger)


def monitored_engine(config: str, stage: int) -> list[str]:
    """The same under DeepSpeed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        engine = make_engine(stage, zero=PARTITION_ALL if stage == 3 else {})
        debugger = PrecisionDebugger(config)
        debugger.monitor(engine)
        for tokens in global_batches():
            step_engine(engine, tokens, 1.0)
    return stopped(debugger)


def stopped(debugger: PrecisionDebugger) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        debugger.stop()
    return [str(one.message) for one in caught if isinstance(one.message, traindiff.TraindiffWarning)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process on the gathered batch."""
    where = tmp_path_factory.mktemp("reference")
    assert monitored(str(configuration(where, grad_level="L2", bounds=[-0.01, 0, 0.01]))) == []
    return where / "dump"


def assert_same_gradients(found: Path, reference: Path, *, rank: int = 0) -> None:
    """Up to rounding, which turns elements around that are zero but for it."""
    for step, (rows, expected) in enumerate(zip(tables(found, rank), tables(reference), strict=True)):
        own = {name.replace("module.", ""): (name, row) for name, row in rows.items()}
        assert set(own) == set(expected) == NAMES
        for path, (name, row) in own.items():
            other = expected[path]
            assert row["shape"] == other["shape"]
            for number in ("max", "min", "norm"):
                assert float(row[number]) == pytest.approx(float(other[number]), rel=1e-3, abs=1e-6)
            agree = directions(found, step, name, rank) == directions(reference, step, path)
            assert np.mean(agree) > 0.97
            intervals = [key for key in row if key.startswith("(")]
            assert len(intervals) == 4
            assert sum(float(row[key]) for key in intervals) == pytest.approx(1)
            for key in intervals[::3]:  # not those that zero lies between
                assert float(row[key]) == pytest.approx(float(other[key]), abs=0.01)


def test_every_rank_of_ddp_writes_its_own_files_at_once(reference: Path, tmp_path: Path) -> None:
    config = configuration(tmp_path, grad_level="L2", bounds=[-0.01, 0, 0.01])
    assert run_on_ranks(monitored, 2, str(config), in_ddp) == [[], []]

    for rank in (0, 1):
        assert_same_gradients(tmp_path / "dump", reference, rank=rank)
    assert next(iter(tables(tmp_path / "dump")[0])).startswith("module.")
    comparison = traindiff.compare(reference / "recording", tmp_path / "dump" / "recording")
    assert comparison.directions is not None
    assert comparison.directions.only == ((), ())


def test_only_the_ranks_that_are_asked_for_write(tmp_path: Path) -> None:
    config = configuration(tmp_path, rank=[1])
    run_on_ranks(monitored, 2, str(config), in_ddp)
    assert not (tmp_path / "dump" / "rank0").exists()
    assert len(tables(tmp_path / "dump", 1)) == 3
    assert traindiff.open_recording(tmp_path / "dump" / "recording").ranks == (1,)


ENGINES: dict[str, Callable[[Model], nn.Module]] = {"fsdp1": sharded, "fsdp2": fully_sharded}


@pytest.mark.parametrize("engine", ENGINES)
def test_shards_are_recorded_and_make_the_files_of_whole_gradients(
    engine: str, reference: Path, tmp_path: Path
) -> None:
    config = configuration(tmp_path, grad_level="L2", bounds=[-0.01, 0, 0.01])
    for (message,) in run_on_ranks(monitored, 2, str(config), ENGINES[engine]):
        assert "traindiff export msprobe" in message

    assert_whole(tmp_path, reference)


@NEEDS_DEEPSPEED
@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=() if stage == 3 else pytest.mark.release) for stage in (1, 2, 3)]
)
def test_shards_of_zero_make_the_files_of_whole_gradients(stage: int, reference: Path, tmp_path: Path) -> None:
    config = configuration(tmp_path, grad_level="L2", bounds=[-0.01, 0, 0.01])
    for found in run_on_ranks(monitored_engine, 2, str(config), stage):
        assert len(found) == 1

    recording = traindiff.open_recording(str(tmp_path / "dump" / "recording"))
    assert export_gradients(recording, str(tmp_path / "dump"), overwrite=True) == 3 * len(NAMES)
    assert_first_step(tmp_path / "dump", reference)
    merged_over_ranks(tmp_path, reference)


def assert_whole(where: Path, reference: Path) -> None:
    recording = traindiff.open_recording(str(where / "dump" / "recording"))
    assert export_gradients(recording, str(where / "dump"), overwrite=True) == 3 * len(NAMES)
    assert_same_gradients(where / "dump", reference)
    merged_over_ranks(where, reference)


def assert_first_step(found: Path, reference: Path) -> None:
    """The training under DeepSpeed has another weight decay, so its later steps are others."""
    rows, expected = tables(found)[0], tables(reference)[0]
    assert set(rows) == set(expected)
    for name, row in rows.items():
        assert float(row["norm"]) == pytest.approx(float(expected[name]["norm"]), rel=1e-3)
        assert np.mean(directions(found, 0, name) == directions(reference, 0, name)) > 0.97


def merged_over_ranks(where: Path, reference: Path) -> None:
    """`traindiff compare` merges the signs of shards by itself."""
    found: Any = traindiff.compare(reference / "recording", where / "dump" / "recording", steps="0").directions
    assert set(found.parameters) == NAMES
    assert (found.only, found.unknown) == (((), ()), {})
    assert found.summary[0].share > 0.99
