"""ZeroRedundancyOptimizer: each rank updates some of the parameters, and broadcasts them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import traindiff
from tests.observe.sharding.test_data_parallel import in_ddp
from tests.observe.sharding.training import Model, train
from tests.on_ranks import run_on_ranks
from traindiff.analyse.merge.run_steps import run_steps
from traindiff.analyse.rules.replay import replayed
from traindiff.storage import open_recording


def zero(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, lr=1e-2)


def train_both_ways(directory: str) -> None:
    train(f"{directory}/given", in_ddp, make_optimizer=zero)
    train(f"{directory}/found", in_ddp, make_optimizer=zero, finds_optimizer=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("zero")
    train(directory / "reference")
    run_on_ranks(train_both_ways, 2, str(directory))
    return directory


@pytest.mark.parametrize("name", ["given", "found"])
def test_it_is_equivalent_to_one_process(name: str, runs: Path) -> None:
    comparison = traindiff.compare(runs / "reference", runs / name)

    assert comparison.verdict == "equivalent", str(comparison)
    assert not any(comparison.unaligned)
    assert {row.slot for row in comparison.differences if row.phase == "optimizer"} >= {"exp_avg", "exp_avg_sq", "step"}
    assert not any("replayed" in note for note in comparison.notes)


def test_each_rank_has_the_state_of_its_own_parameters_and_all_of_them_after_the_broadcast(runs: Path) -> None:
    (table, *_) = (step.table for step in run_steps(open_recording(str(runs / "given"))))
    paths = {name for name, _ in Model().named_parameters()}

    moments = {key.path: entry for key, entry in table.items() if key.slot == "exp_avg"}
    values = {key.path: entry for key, entry in table.items() if key[:2] == ("param", "") and key.slot == "value"}
    assert moments.keys() == values.keys() == paths
    assert {part.rank for entry in moments.values() for part in entry.parts} == {0, 1}
    assert all(len(entry.parts) == 1 for entry in moments.values())
    assert all(len(entry.parts) == 2 and not entry.apart for entry in values.values())
    assert {one.key.path for one in replayed(table)} == paths
