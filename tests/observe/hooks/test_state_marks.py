"""State of an optimizer that something else changes between its steps is recorded; steps themselves are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import traindiff
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import rows
from traindiff.core.observation import EDITED

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
}


def train(path: Path, make: Make, *, change: Callable[[int, Any], None] = lambda step, optimizer: None) -> Path:
    torch.manual_seed(0)
    model = mlp()
    optimizer = make(model.parameters())
    with traindiff.record(path, model, optimizer, observe=("optimizer", "witness"), strict=True):
        for step in range(4):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.ones(4, 8)).square().sum()
                loss.backward()
                return loss

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            change(step, optimizer)
    return path


def edited(path: Path) -> list[tuple[int, str, str]]:
    return [(seen.step, seen.path, seen.slot) for seen, _ in rows(path, phase="optimizer", stage=EDITED)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_alone_are_no_edits(tmp_path: Path, name: str) -> None:
    assert edited(train(tmp_path / "run", OPTIMIZERS[name])) == []


def test_a_bit_that_flips_is_named_with_its_tensor_and_step(tmp_path: Path) -> None:
    def change(step: int, optimizer: Any) -> None:
        if step == 1:
            first = optimizer.param_groups[0]["params"][0]
            optimizer.state[first]["exp_avg_sq"].view(torch.int32).view(-1)[3] ^= 1 << 20

    path = train(tmp_path / "run", torch.optim.AdamW, change=change)
    (found,) = edited(path)
    assert found[::2] == (2, "exp_avg_sq")

    (warning,) = traindiff.check(str(path), rules="edited").warnings
    assert warning.step == 2
    assert (
        warning.message == f"exp_avg_sq of {found[1]} changed between step 1 and step 2, not by the optimizer's step."
    )


def test_state_that_is_loaded_again_is_the_same_state(tmp_path: Path) -> None:
    def change(step: int, optimizer: Any) -> None:  # noqa: ARG001
        optimizer.load_state_dict(optimizer.state_dict())

    assert edited(train(tmp_path / "run", torch.optim.AdamW, change=change)) == []


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_steps_of_other_optimizers_are_no_edits(tmp_path: Path, order: tuple[str, str]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(6, 6), "second": nn.Linear(6, 1)})
    optimizers = {name: torch.optim.Adam(part.parameters()) for name, part in model.items()}
    with traindiff.record(tmp_path / "run", model, optimizers, observe=("optimizer", "witness"), strict=True):
        for step in range(5):
            for name in (*order, order[1]) if step % 2 else order:
                model["second"](model["first"](torch.ones(4, 6))).square().sum().backward()
                optimizers[name].step()
                optimizers[name].zero_grad()

    assert edited(tmp_path / "run") == []


def test_without_the_witness_state_is_not_marked(tmp_path: Path) -> None:
    def change(step: int, optimizer: Any) -> None:  # noqa: ARG001
        for state in optimizer.state.values():
            state["exp_avg"].zero_()

    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer, observe="optimizer", strict=True):
        for step in range(3):
            model(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()
            change(step, optimizer)

    assert edited(tmp_path / "run") == []
