"""An optimizer that holds nothing of the model is said at once, and none that holds some of it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

import traindiff
from tests.observe.hooks.models import mlp


def warned(tmp_path: Path, model: object, optimizer: object) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with traindiff.record(tmp_path / "run", model, optimizer):  # type: ignore[arg-type]
            pass
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def test_an_optimizer_of_another_model_is_said_with_the_names(tmp_path: Path) -> None:
    model, other = mlp(), mlp()
    (message,) = warned(tmp_path, model, SGD(other.parameters(), lr=0.1))
    assert message.startswith(
        "record(optimizer=...), optimizer: this SGD holds 4 parameters, and none of the model's 4 (0.bias, 0.weight, "
        "2.bias, ...). Its steps are counted, and what it holds is observed; what changes the model is not. Give the "
        "optimizer of this model"
    )


def test_of_several_optimizers_the_one_is_named(tmp_path: Path) -> None:
    model = mlp()
    given = {"right": SGD(model.parameters(), lr=0.1), "wrong": SGD(mlp().parameters(), lr=0.1)}
    (message,) = warned(tmp_path, model, given)
    assert "record(optimizer=...), wrong: this SGD" in message


def test_parameters_that_were_replaced_after_the_optimizer_was_made_are_said(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    for module in model:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().clone())
            module.bias = nn.Parameter(module.bias.detach().clone())
    (message,) = warned(tmp_path, model, optimizer)
    assert "the model's parameters were replaced after it was made: make it afterwards" in message


def test_what_holds_some_of_the_model_is_right(tmp_path: Path) -> None:
    model, outer = mlp(), mlp()
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    of_tied = SGD(tied.parameters(), lr=0.1)
    tied[1].weight = tied[0].weight
    frozen = mlp()
    frozen[0].requires_grad_(False)
    for number, (trained, optimizer) in enumerate(
        [
            (model, SGD(model[2].parameters(), lr=0.1)),
            (model, SGD([*outer.parameters(), model[0].weight], lr=0.1)),
            (tied, of_tied),
            (frozen, SGD(frozen[2].parameters(), lr=0.1)),
            (nn.DataParallel(model), SGD(model.parameters(), lr=0.1)),
            (torch.compile(model, backend="eager"), SGD(model.parameters(), lr=0.1)),
            (model.double(), SGD(model.parameters(), lr=0.1)),
            ({"one": model, "two": outer}, {"one": SGD(model.parameters()), "two": SGD(outer.parameters())}),
            (mlp().requires_grad_(False), SGD(outer.parameters(), lr=0.1)),
            (nn.ReLU(), SGD(model.parameters(), lr=0.1)),
            (model, None),
        ]
    ):
        assert warned(tmp_path / str(number), trained, optimizer) == []


def test_a_watch_says_so_too() -> None:
    with pytest.warns(traindiff.TraindiffWarning, match=r"watch\(optimizer=\.\.\.\), optimizer: this SGD holds 4"):
        traindiff.watch(mlp(), SGD(mlp().parameters(), lr=0.1)).close()
