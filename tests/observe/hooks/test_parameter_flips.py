"""A bit that flips in a parameter, or in the optimizer's state, is told from what a training writes to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.observe.hooks.models import mlp
from traindiff.analyse.findings import Finding

BETWEEN_STEPS, BEFORE_BACKWARD, BEFORE_UPDATE = "between steps", "before backward", "before the update"


class Training(NamedTuple):
    """What a change is called with: the step is the one that first computes with what it does."""

    step: int
    moment: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def weight(self) -> Tensor:
        return self.model.get_parameter("0.weight")


Change = Callable[[Training], None]


def flip(tensor: Tensor, bit: int) -> None:
    """As hardware does it: torch does not see it."""
    bits: Any = tensor.detach().numpy().reshape(-1).view(np.uint32)
    bits[5] ^= 1 << bit


def train(
    path: Path, change: Change, *, observe: tuple[str, ...] = ("param", "update", "optimizer", "witness")
) -> Path:
    """Four steps; `change` is called at each moment of each."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with traindiff.record(path, model, optimizer, observe=observe, strict=True):
        for step in range(4):
            change(Training(step, BETWEEN_STEPS, model, optimizer))
            loss = model(torch.randn(4, 8)).square().sum()
            change(Training(step, BEFORE_BACKWARD, model, optimizer))
            loss.backward()
            change(Training(step, BEFORE_UPDATE, model, optimizer))
            optimizer.step()
            optimizer.zero_grad()
    return path


def found(path: Path) -> list[Finding]:
    verdict = traindiff.check(path, rules="bit-flip,edited")
    return [*verdict.findings, *verdict.warnings]


SAID = {
    BETWEEN_STEPS: "after the optimizer's step before and before the forward pass",
    BEFORE_BACKWARD: "after the forward pass began and before the optimizer's step",
    BEFORE_UPDATE: "after the forward pass began and before the optimizer's step",
}


@pytest.mark.parametrize("moment", SAID)
@pytest.mark.parametrize("bit", [2, 30])
def test_a_bit_of_a_parameter_is_one_finding(tmp_path: Path, moment: str, bit: int) -> None:
    def change(training: Training) -> None:
        if (training.step, training.moment) == (2, moment):
            flip(training.weight, bit)

    (finding,) = found(train(tmp_path / "run", change))

    assert (finding.kind, finding.step, finding.path) == ("bit-flip", 2, "0.weight")
    assert finding.message.startswith(f"Bit {bit} of one element of the parameter changed in memory, {SAID[moment]}.")


def test_between_steps_it_is_found_without_the_witness(tmp_path: Path) -> None:
    def change(training: Training) -> None:
        if (training.step, training.moment) == (2, BETWEEN_STEPS):
            flip(training.weight, 20)

    (finding,) = found(train(tmp_path / "run", change, observe=("param", "update")))

    assert (finding.kind, finding.step, finding.path) == ("bit-flip", 2, "0.weight")


@pytest.mark.parametrize("slot", ["exp_avg", "exp_avg_sq"])
def test_a_bit_of_a_state_is_one_finding(tmp_path: Path, slot: str) -> None:
    def change(training: Training) -> None:
        if (training.step, training.moment) == (2, BEFORE_BACKWARD):
            flip(training.optimizer.state[training.weight][slot], 17)

    (finding,) = found(train(tmp_path / "run", change))

    assert (finding.kind, finding.step, finding.path) == ("bit-flip", 2, "0.weight")
    assert finding.message.startswith(f"Bit 17 of one element of the optimizer's {slot} changed in memory")


def doubled(training: Training) -> None:
    """One bit is another, by a write that torch counts."""
    if training.step == 2:
        with torch.no_grad():
            training.weight[0, 0] *= 2.0


def doubled_through_data(training: Training) -> None:
    """One bit is another, in a training that has written to parameters in uncounted ways before."""
    if training.step < 2:
        training.weight.data.mul_(0.999)
    else:
        training.weight.data[0, 0] *= 2.0


def doubled_in_two(training: Training) -> None:
    if training.step == 2:
        for parameter in (training.weight, training.model.get_parameter("2.weight")):
            parameter.data[0, 0] *= 2.0


def clamped_through_data(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def averaged_for_a_moment(training: Training) -> None:
    """Other weights for an evaluation, and then the old ones again."""
    kept = [parameter.detach().clone() for parameter in training.model.parameters()]
    for parameter in training.model.parameters():
        parameter.data.mul_(0.5)
    for parameter, before in zip(training.model.parameters(), kept, strict=True):
        parameter.data.copy_(before)


def state_decayed(training: Training) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg"].data.mul_(0.5)


def of_one_element_in_each_step(training: Training) -> None:
    """One bit is another, again and again."""
    if training.moment == BETWEEN_STEPS and training.step:
        training.weight.data[0, 0] *= 2.0


def a_column_at_once(training: Training) -> None:
    """Many elements, whose bits add up to one."""
    if (training.step, training.moment) == (2, BETWEEN_STEPS):
        training.weight.data[:, 5] *= 0.5


def nothing(training: Training) -> None:
    pass


@pytest.mark.parametrize(
    "change",
    [
        doubled,
        doubled_through_data,
        doubled_in_two,
        clamped_through_data,
        averaged_for_a_moment,
        state_decayed,
        of_one_element_in_each_step,
        a_column_at_once,
        nothing,
    ],
)
def test_what_a_training_writes_is_no_flip(tmp_path: Path, change: Change) -> None:
    assert [one for one in found(train(tmp_path / "run", change)) if one.kind == "bit-flip"] == []
