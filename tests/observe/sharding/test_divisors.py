"""FSDP2 that divides gradients by another number than that of its ranks, as torchtitan has it do."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from torch import nn

import traindiff
from tests.observe.sharding.test_data_parallel import fully_sharded
from tests.observe.sharding.training import Model, train
from tests.on_ranks import run_on_ranks
from traindiff.core.torch_compat.training import is_fully_sharded

OBSERVED = ("batch", "forward", "loss", "backward", "grad", "grad.micro", "optimizer", "update", "param", "witness")


def divided_by(number: float, model: Model) -> nn.Module:
    sharded = fully_sharded(model)
    for module in sharded.modules():
        if is_fully_sharded(module):
            module.set_gradient_divide_factor(number)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other one
    return sharded


def train_all(directory: str) -> None:
    summed, averaged = partial(divided_by, 1.0), partial(divided_by, 2.0)
    train(f"{directory}/summed", summed, loss_scale=0.5, micro_batches=2, observe=OBSERVED)
    train(f"{directory}/averaged", averaged, micro_batches=2, observe=OBSERVED)
    train(f"{directory}/twice", summed, micro_batches=2, observe=OBSERVED)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("divisors")
    run_on_ranks(train_all, 2, str(directory))
    train(directory / "one process", micro_batches=2, observe=OBSERVED)
    return directory


@pytest.mark.parametrize("name", ["summed", "averaged"])
def test_a_loss_that_is_divided_for_it_is_right(name: str, runs: Path) -> None:
    checked = traindiff.check(runs / name)
    comparison = traindiff.compare(runs / "one process", runs / name)

    assert (checked.verdict, checked.warnings) == ("healthy", ()), str(checked)
    assert comparison.verdict == "equivalent", str(comparison)


def test_a_loss_that_is_not_divided_is_named(runs: Path) -> None:
    assert traindiff.check(runs / "twice").verdict == "healthy"  # the gradients are those of this loss
    first = traindiff.compare(runs / "one process", runs / "twice").first_divergence

    assert first is not None
    assert (first.step, first.phase, first.kind) == (0, "loss", "scale")
    assert first.message.startswith("The candidate's is 2 x the baseline's (= world size 2 and its 2 micro-batches")
