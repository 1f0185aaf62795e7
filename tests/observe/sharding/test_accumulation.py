"""Data-parallel engines that accumulate gradients, and settings of them, against one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.observe.sharding.test_data_parallel import fully_sharded
from tests.observe.sharding.test_fsdp1 import sharded
from tests.observe.sharding.training import Model, train
from tests.on_ranks import run_on_ranks

WITH_MICRO = ("batch", "forward", "loss", "backward", "grad", "optimizer", "update", "param", "grad.micro")


def in_ddp(model: Model, **settings: bool) -> nn.Module:
    return DistributedDataParallel(model, **settings)


def in_compressing_ddp(model: Model) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def lose(model: nn.Module, *, rank: int | None) -> None:
    """Before the second micro-batch: what the first has brought is lost, on one rank or on all of them."""
    if rank is None or torch.distributed.get_rank() == rank:
        model.zero_grad()


RUNS: dict[str, Callable[[str], None]] = {
    "no-sync": partial(train, prepare=in_ddp, micro_batches=2, no_sync=True, observe=WITH_MICRO),
    "sync": partial(train, prepare=in_ddp, micro_batches=2),
    "bucket-view": partial(train, prepare=partial(in_ddp, gradient_as_bucket_view=True)),
    "static-graph": partial(train, prepare=partial(in_ddp, static_graph=True)),
    "unused-parameters": partial(train, prepare=partial(in_ddp, find_unused_parameters=True)),
    "comm-hook": partial(train, prepare=in_compressing_ddp),
    "fsdp1-no-sync": partial(train, prepare=sharded, micro_batches=2, no_sync=True),
    "fsdp2-kept": partial(train, prepare=partial(fully_sharded, reshard_after_forward=False), observe=WITH_MICRO),
    "lost": partial(
        train, prepare=in_ddp, micro_batches=4, no_sync=True, observe=WITH_MICRO,
        before_micro_batch={1: partial(lose, rank=None)},
    ),
    "lost-on-rank-1": partial(
        train, prepare=in_ddp, micro_batches=4, no_sync=True, observe=WITH_MICRO,
        before_micro_batch={1: partial(lose, rank=1)},
    ),
}  # fmt: skip


def train_all(directory: str) -> None:
    for name, run in RUNS.items():
        run(f"{directory}/{name}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("accumulation")
    run_on_ranks(train_all, 2, str(directory))
    train(directory / "whole", observe=WITH_MICRO)
    train(directory / "accumulated", micro_batches=2)
    return directory


@pytest.mark.parametrize("baseline", ["whole", "accumulated"])
@pytest.mark.parametrize("candidate", [name for name in RUNS if not name.startswith(("lost", "comm"))])
def test_it_is_equivalent_to_one_process(baseline: str, candidate: str, runs: Path) -> None:
    comparison = traindiff.compare(runs / baseline, runs / candidate)

    assert comparison.verdict == "equivalent", str(comparison)
    assert not any(comparison.unaligned)


def test_contributions_of_gathered_parameters_are_observed(runs: Path) -> None:
    comparison = traindiff.compare(runs / "whole", runs / "fsdp2-kept")

    micro = {row.path for row in comparison.differences if row.stage == "micro"}
    assert micro == {name for name, _ in Model().named_parameters()}


def test_gradients_that_a_hook_compresses_agree_on_the_ranks_and_are_as_far_off_as_float16(runs: Path) -> None:
    comparison = traindiff.compare(runs / "whole", runs / "comm-hook")

    assert comparison.verdict == "equivalent", str(comparison)
    assert any(note.startswith("16 gradients are reduced over ranks in their own dtype") for note in comparison.notes)
    gradients = [row for row in comparison.differences if (row.phase, row.slot) == ("grad", "grad")]
    assert 1e-5 < max(row.difference for row in gradients) < 2e-3


def test_a_micro_batch_that_is_lost_on_all_ranks_is_named(runs: Path) -> None:
    first = traindiff.compare(runs / "whole", runs / "lost").first_divergence

    assert first is not None
    assert (first.step, first.phase, first.stage, first.kind) == (0, "grad", "", "lost-contribution")
    assert "lacks what micro-step 0 of 4 contributed; it is the sum of the other 3" in first.message


def test_a_micro_batch_that_is_lost_on_one_rank_is_named_with_the_rank(runs: Path) -> None:
    first = traindiff.compare(runs / "whole", runs / "lost-on-rank-1").first_divergence

    assert first is not None
    assert (first.step, first.phase, first.stage, first.kind) == (0, "grad", "", "lost-contribution")
    assert (
        "lacks what rank 1 in micro-step 0 contributed; it is the sum of the other 7 of 8 contributions of all ranks"
        in first.message
    )
