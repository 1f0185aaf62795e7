"""Optimizers go on to count their steps, and to hold their parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

import traindiff
from tests.analyse.rules.small_trainings import classifier, found, kinds, points
from traindiff.analyse.check import Verdict

Change = Callable[[nn.Sequential, Any, int], object]
COUNTING = (Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, ASGD, RMSprop, Rprop)
NEW = frozenset({"step-not-counted", "taken-out"})


def trained(
    path: Path, change: Change, *, make: Callable[..., Optimizer] = Adam, steps: int = 16, clip: bool = False
) -> Verdict:
    """What is said of a training in which something is changed before some steps."""
    model = classifier()
    optimizer = make(model.parameters(), lr=0.01)
    with traindiff.record(path, model, optimizer, strict=True):
        for step in range(steps):
            change(model, optimizer, step)
            inputs, labels = points(step)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return traindiff.check(path)


def stand_still(_: nn.Module, optimizer: Optimizer, step: int) -> None:
    for state in optimizer.state.values():
        if step >= 6:
            state["step"] -= 1


@pytest.mark.parametrize("kind", COUNTING)
def test_a_count_that_stands_still_is_found(kind: Any, tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", stand_still, make=kind)

    finding = found(verdict, "step-not-counted")
    assert (verdict.verdict, finding.step, finding.slot, finding.evidence["state_step"]) == (
        "unhealthy",
        6,
        "step",
        6.0,
    )
    assert "and 5 more parameters move in 10 steps, from step 6 on" in finding.message


def test_a_count_in_a_short_dtype_stands_still_by_itself(tmp_path: Path) -> None:
    def shorten(_: nn.Module, optimizer: Optimizer, step: int) -> None:
        for state in optimizer.state.values():
            state["step"] = (state["step"] + 248.0 * (step == 1)).bfloat16()

    finding = found(trained(tmp_path / "run", shorten, steps=20), "step-not-counted")

    assert finding.evidence["state_step"] == 256.0
    assert "in which 256 + 1 is 256" in finding.message


def warm_restart(_: nn.Module, optimizer: Optimizer, step: int) -> None:
    for state in optimizer.state.values():
        if step % 4 == 0:
            state["step"].zero_()


def freeze(model: nn.Sequential, _: Optimizer, step: int) -> None:
    if step == 6:
        model[2].requires_grad_(requires_grad=False)  # type: ignore[operator]


def rest(_: nn.Module, optimizer: Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.01 if step < 6 else 0.0


def take_out(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
    if step == 6:
        held = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = [one for one in held if one is not model[2].weight]


def freeze_and_take_out(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
    take_out(model, optimizer, step)
    if step == 6:
        model[2].weight.requires_grad_(requires_grad=False)  # type: ignore[operator,union-attr]


def regroup(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
    take_out(model, optimizer, step)
    if step == 6:
        optimizer.add_param_group({"params": [model[2].weight], "lr": 0.001})


def thaw(model: nn.Sequential, optimizer: Optimizer, step: int) -> None:
    take_out(model, optimizer, step)
    if step == 12:
        optimizer.add_param_group({"params": [model[2].weight]})


@pytest.mark.parametrize("kind", [Adam, Rprop, SGD])
@pytest.mark.parametrize("change", [warm_restart, freeze, rest, freeze_and_take_out, regroup, thaw])
def test_legal_changes_are_none(change: Change, kind: Any, tmp_path: Path) -> None:
    if change is warm_restart and kind is SGD:
        pytest.skip("SGD does not count")
    assert not kinds(trained(tmp_path / "run", change, make=kind)) & NEW


def test_an_optimizer_that_counts_every_third_call_rests_in_between(tmp_path: Path) -> None:
    class EveryThird(SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            for one in self.param_groups[0]["params"]:
                self.state[one].setdefault("step", torch.zeros(()))
                self.state[one]["step"] += float(self.calls % 3 == 0)
            return super().step(closure)

    assert "step-not-counted" not in kinds(trained(tmp_path / "run", lambda *_: None, make=EveryThird, steps=24))


def test_a_step_that_a_loss_scaler_leaves_out_is_not_counted(tmp_path: Path) -> None:
    model = classifier()
    optimizer = Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for step in range(14):
            inputs, labels = points(step)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), labels) * (float("inf") if step > 6 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    assert "step-not-counted" not in kinds(traindiff.check(tmp_path / "run"))


def test_lbfgs_keeps_no_count_of_steps(tmp_path: Path) -> None:
    model = classifier()
    optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=2)
    inputs, labels = points(0)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for _ in range(8):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(inputs), labels)
                loss.backward()
                return loss

            optimizer.step(closure)

    assert not kinds(traindiff.check(tmp_path / "run")) & NEW


@pytest.mark.parametrize("clip", [False, True])
def test_a_parameter_that_is_taken_out_is_a_warning(tmp_path: Path, *, clip: bool) -> None:
    verdict = trained(tmp_path / "run", take_out, clip=clip)

    finding = found(verdict, "taken-out")
    assert (verdict.verdict, finding.step, finding.path) == ("healthy", 6, "2.weight")
    assert finding.message.startswith("2.weight was taken out of the parameter groups before step 6:")
    assert kinds(verdict) == {"taken-out"}


def test_training_in_phases_with_an_optimizer_for_each_is_none(tmp_path: Path) -> None:
    model = classifier()
    with traindiff.record(tmp_path / "run", model, strict=True):
        for phase in range(2):
            optimizer = Adam(model.parameters() if phase == 0 else model[2].parameters(), lr=0.01)
            for step in range(8):
                inputs, labels = points(step)
                model.zero_grad()
                functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()

    assert not kinds(traindiff.check(tmp_path / "run")) & NEW


def test_a_gan_whose_optimizers_share_nothing_is_none(tmp_path: Path) -> None:
    model = classifier()
    first, second = Adam(model[0].parameters(), lr=0.01), Adam(model[2].parameters(), lr=0.01)
    with traindiff.record(tmp_path / "run", model, {"first": first, "second": second}, strict=True):
        for step in range(14):
            inputs, labels = points(step)
            for optimizer in (first, second):
                model.zero_grad()
                functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()

    assert not kinds(traindiff.check(tmp_path / "run")) & NEW


def test_sparse_embeddings_count_their_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.EmbeddingBag(40, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randint(40, (8, 3))).square().sum().backward()
            optimizer.step()

    assert not kinds(traindiff.check(tmp_path / "run")) & NEW
