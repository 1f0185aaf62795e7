"""The state that an optimizer leaves for later steps is judged by itself, for every optimizer of torch that has one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import traindiff
from tests.faulty_step import at_end_of_step
from tests.observe.hooks.models import mlp
from tests.observe.hooks.trainings import batches
from traindiff.analyse.check import Verdict

Change = Callable[[Tensor, Tensor], object]

KEPT: list[tuple[Any, dict[str, Any], str]] = [
    *product((optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam), ({},), ("exp_avg", "exp_avg_sq")),
    (optim.Adam, {"amsgrad": True}, "max_exp_avg_sq"),
    (optim.Adam, {"foreach": True, "weight_decay": 0.1}, "exp_avg"),
    (optim.Adam, {"fused": True}, "exp_avg_sq"),
    (optim.Adamax, {}, "exp_avg"),
    (optim.Adamax, {}, "exp_inf"),
    (optim.Adagrad, {}, "sum"),
    (optim.Adadelta, {}, "square_avg"),
    (optim.Adadelta, {"foreach": True}, "acc_delta"),
    (optim.RMSprop, {}, "square_avg"),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}, "grad_avg"),
    (optim.RMSprop, {"momentum": 0.9}, "momentum_buffer"),
    (optim.SGD, {"momentum": 0.9}, "momentum_buffer"),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, "momentum_buffer"),
    (optim.Rprop, {}, "prev"),
    (optim.Rprop, {}, "step_size"),
    (optim.Muon, {}, "momentum_buffer"),
]

CHANGES: dict[str, tuple[Change, str]] = {
    "kept": (lambda held, before: held.copy_(before), "leaves it as it was"),
    "zero": (lambda held, _: held.zero_(), "leaves it 0"),
    "doubled": (lambda held, _: held.mul_(2.0), "makes something else of it"),
    "one element": (lambda held, _: held.view(-1)[3:4].add_(0.5), "makes something else of it"),
}


def trained(path: Path, kind: Any, options: dict[str, Any], name: str = "", change: Change | None = None) -> Verdict:
    """What is said of a training whose optimizer changes a part of its state at the end of its third step."""
    torch.manual_seed(0)
    model = mlp()
    matrices = [one for one in model.parameters() if one.dim() == 2]
    optimizer = kind(matrices if kind is optim.Muon else model.parameters(), **{"lr": 0.01, **options})
    before: dict[Tensor, Tensor] = {}
    steps = [0]

    def keep(optimizer: Optimizer, *_: Any) -> None:
        before.update({one: state[name].clone() for one, state in optimizer.state.items() if name in state})

    def disturb(optimizer: Optimizer, *_: Any) -> None:
        steps[0] += 1
        for one, held in before.items():
            if steps[0] == 3 and change is not None:
                change(optimizer.state[one][name], held)

    optimizer.register_step_pre_hook(keep)
    at_end_of_step(optimizer, disturb)
    with traindiff.record(path, model, optimizer, observe=("replay", "param", "grad"), strict=True):
        for batch in batches(4):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    return traindiff.check(path, rules="update-rule")


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize(("kind", "options", "name"), KEPT)
def test_a_state_that_is_not_what_the_formula_gives_is_found_and_named(
    kind: Any, options: dict[str, Any], name: str, how: str, tmp_path: Path
) -> None:
    change, words = CHANGES[how]
    found = trained(tmp_path / "run", kind, options, name, change).findings

    assert {(one.step, one.kind, one.evidence["state"]) for one in found} == {(2, "update-rule", name)}
    assert f"{kind.__name__} keeps {name} of {found[0].path} for later steps, and {words}:" in found[0].message


LEGAL = [
    *product(
        (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta, optim.RMSprop,
         optim.SGD, optim.Rprop, optim.ASGD, optim.Muon, optim.Adafactor),
        ({}, {"weight_decay": 0.1}, {"maximize": True}),
    ),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Adam, {"amsgrad": True, "betas": (0.5, 0.9), "eps": 1e-3}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), LEGAL)
def test_right_states_are_none(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    if kind in (optim.Rprop, optim.Muon, optim.Adafactor) and options:
        options = {}
    assert trained(tmp_path / "run", kind, options).verdict == "healthy"


@pytest.mark.parametrize("overflows", [False, True])
def test_states_under_a_loss_scaler_are_none(tmp_path: Path, *, overflows: bool) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = optim.Adam(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=("replay", "param", "grad"), strict=True):
        for number, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            factor = float("inf") if overflows and number == 1 else 1.0
            scaler.scale(model(batch).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()

    assert traindiff.check(tmp_path / "run", rules="update-rule").verdict == "healthy"


def test_sparse_rows_and_complex_parameters_are_none(tmp_path: Path) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(40, 4, sparse=True)
    optimizer = optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    with traindiff.record(tmp_path / "sparse", table, optimizer, observe=("replay", "param", "grad"), strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.randint(40, (8,))).square().sum().backward()
            optimizer.step()
    assert traindiff.check(tmp_path / "sparse", rules="update-rule").verdict == "healthy"

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    model = Complex()
    adam = optim.Adam(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "complex", model, adam, observe=("replay", "param", "grad"), strict=True):
        for _ in range(3):
            adam.zero_grad()
            model.weight.abs().square().sum().backward()
            adam.step()
    assert traindiff.check(tmp_path / "complex", rules="update-rule").verdict == "healthy"
