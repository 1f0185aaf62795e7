"""Trainings that are right, and that use optimizers in ways that a replay could misunderstand, give no finding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import traindiff
from tests.analyse.rules.test_replay import findings
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import rows
from tests.observe.hooks.trainings import batches

KINDS: list[Any] = [optim.SGD, optim.AdamW, optim.RMSprop, optim.NAdam, optim.Rprop, optim.ASGD, optim.Adafactor]

Loop = Callable[[nn.Module, Optimizer, Tensor, int], None]


def step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def judged(path: Path, model: nn.Module, optimizer: Optimizer, loop: Loop, *, steps: int = 3) -> list[Any]:
    """The findings; there must be replays."""
    with traindiff.record(path, model, optimizer, observe=("replay", "param", "grad"), strict=True):
        for number, batch in enumerate(batches(steps)):
            loop(model, optimizer, batch, number)
    assert rows(path, stage="residual")
    return findings(path)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_that_change_between_steps(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def loop(model: nn.Module, optimizer: Optimizer, batch: Tensor, number: int) -> None:
        if number == 1:
            scheduler.step()  # before the step, and in other steps after it
        step(model, optimizer, batch)
        for group in optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] += 0.01
        scheduler.step()

    assert judged(tmp_path / "run", model, optimizer, loop) == []


@pytest.mark.parametrize("kind", KINDS)
def test_groups_with_settings_of_their_own(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    decayed = {} if kind is optim.Rprop else {"weight_decay": 0.1}
    groups = [
        {"params": [one for one in model.parameters() if one.dim() == 2], **decayed},
        {"params": [one for one in model.parameters() if one.dim() == 1], "lr": 0.03},
    ]

    assert judged(tmp_path / "run", model, kind(groups, lr=0.01), lambda m, o, b, _: step(m, o, b)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_was_loaded_in_the_middle_of_a_training(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    before = kind(model.parameters(), lr=0.01)
    for batch in batches(2):
        step(model, before, batch)
    optimizer = kind(model.parameters(), lr=0.5)
    optimizer.load_state_dict(before.state_dict())

    assert judged(tmp_path / "run", model, optimizer, lambda m, o, b, _: step(m, o, b)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_sometimes_have_no_gradient_and_gradients_that_are_clipped(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    first = next(model.parameters())

    def loop(model: nn.Module, optimizer: Optimizer, batch: Tensor, number: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        for part in batch.chunk(2):
            (model(part).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if number == 1:
            first.grad = None
        optimizer.step()

    assert judged(tmp_path / "run", model, kind(model.parameters(), lr=0.01), loop) == []


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_a_loss_scaler_skips(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loop(model: nn.Module, optimizer: Optimizer, batch: Tensor, number: int) -> None:
        optimizer.zero_grad()
        loss = model(batch).square().mean() * (float("inf") if number == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    found = judged(tmp_path / "run", model, kind(model.parameters(), lr=0.01), loop)
    assert [one for one in found if one.phase == "update"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_master_weights_that_a_training_keeps_itself(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp().to(torch.bfloat16)
    masters = [nn.Parameter(one.detach().float()) for one in model.parameters()]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.masters = model, nn.ParameterList(masters)

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x.to(torch.bfloat16)).float()

    both = Both()

    def loop(_: nn.Module, optimizer: Optimizer, batch: Tensor, _number: int) -> None:
        both(batch).square().mean().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)

    found = judged(tmp_path / "run", both, kind(masters, lr=0.01), loop)
    assert [one for one in found if one.phase == "update"] == []


def test_a_scalar_parameter_a_zero_gradient_and_an_empty_parameter(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.unused = nn.Parameter(torch.ones(3, 4))
            self.none = nn.Parameter(torch.ones(0, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + 0.0 * self.unused.sum() + self.none.sum()

    for kind in (*KINDS, optim.Adam, optim.Adamax, optim.RAdam, optim.Adagrad, optim.Adadelta):
        model = Odd()
        optimizer = kind(model.parameters(), lr=0.01)
        if kind is optim.Adafactor:
            model.none.requires_grad_(False)
        path = tmp_path / kind.__name__
        found = judged(path, model, optimizer, lambda m, o, b, _: step(m, o, b))
        assert [one for one in found if one.kind == "update-rule"] == [], kind
