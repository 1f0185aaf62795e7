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


def divided_in_a_part_by(number: float, model: Model) -> nn.Module:
    sharded = divided_by(2.0, model)
    sharded.blocks[1].set_gradient_divide_factor(number)
    return sharded


class Growing:
    """Divides gradients by one more in each step, from 2 on."""

    def __init__(self) -> None:
        self.number = 1.0

    def __call__(self, model: nn.Module) -> None:
        self.number += 1.0
        for module in model.modules():
            if is_fully_sharded(module):
                module.set_gradient_divide_factor(self.number)


def wrong_in_a_part(model: nn.Module) -> None:
    gradient = model.blocks[1].up.weight.grad.to_local().numpy()  # which counts no writes
    gradient *= 2.0


def train_all(directory: str) -> None:
    summed, averaged = partial(divided_by, 1.0), partial(divided_by, 2.0)
    train(f"{directory}/summed", summed, loss_scale=0.5, micro_batches=2, observe=OBSERVED)
    train(f"{directory}/averaged", averaged, micro_batches=2, observe=OBSERVED)
    train(f"{directory}/twice", summed, micro_batches=2, observe=OBSERVED)
    in_a_part = partial(divided_in_a_part_by, 4.0)
    train(f"{directory}/in a part", in_a_part, micro_batches=2, observe=OBSERVED)
    train(f"{directory}/same in a part", partial(divided_in_a_part_by, 2.0), micro_batches=2, observe=OBSERVED)
    train(f"{directory}/wrong", in_a_part, before_step=wrong_in_a_part, observe=OBSERVED)
    growing = {0: Growing()}
    train(f"{directory}/growing", averaged, before_micro_batch=growing, observe=OBSERVED)


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


@pytest.mark.parametrize("name", ["in a part", "same in a part", "growing"])
def test_each_module_has_its_own_divisor_which_is_read_before_each_backward_pass(name: str, runs: Path) -> None:
    checked = traindiff.check(runs / name)

    assert (checked.verdict, checked.warnings) == ("healthy", ()), str(checked)
    assert traindiff.compare(runs / name, runs / name).verdict == "identical"


def test_another_divisor_of_a_part_is_named_there(runs: Path) -> None:
    assert traindiff.compare(runs / "one process", runs / "same in a part").verdict == "equivalent"
    first = traindiff.compare(runs / "one process", runs / "in a part").first_divergence

    assert first is not None
    assert (first.step, first.phase, first.kind) == (0, "grad", "scale")
    assert first.site.startswith("blocks.1.")
    assert first.message.startswith("The candidate's is 0.5 x the baseline's")


def test_a_gradient_that_is_scaled_in_such_a_part_is_found(runs: Path) -> None:
    first = traindiff.check(runs / "wrong").warnings[0]

    assert (first.step, first.kind, first.site) == (0, "wrong-gradient", "blocks.1.up.weight grad")
    assert first.message.startswith("The gradient is 2 x what the inputs and outputs of its layer give.")
