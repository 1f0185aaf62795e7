"""Optimizers that are found when they first step, and those that take the place of others."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import traindiff
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import rows
from tests.observe.hooks.trainings import batches
from traindiff.storage import open_recording


def train(model: nn.Module, *optimizers: Optimizer, steps: int = 1) -> None:
    for batch in batches(steps):
        model(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def numbers(path: Path, phase: str, site: str) -> list[tuple[str, int, int]]:
    return [(seen.optimizer, seen.step, seen.micro_step) for seen, _ in rows(path, phase=phase, path=site, stage="")]


def test_an_optimizer_is_found_at_the_address_of_one_that_is_gone(tmp_path: Path) -> None:
    model, other = mlp(), mlp()
    with traindiff.record(tmp_path / "run", model, strict=True):
        for _ in range(8):
            unrelated = SGD(other.parameters(), lr=0.1)
            train(other, unrelated)
            del unrelated
            optimizer = SGD(model.parameters(), lr=0.1)
            train(model, optimizer)

    assert numbers(tmp_path / "run", "grad", "0.weight") == [("optimizer", step, 0) for step in range(8)]


@pytest.mark.parametrize("first", [slice(0, None), slice(2, None)], ids=["all", "the last layer"])
def test_a_training_that_goes_on_with_another_optimizer_goes_on_counting(tmp_path: Path, first: slice) -> None:
    model = mlp()
    with traindiff.record(tmp_path / "run", model, strict=True):
        train(model, SGD(model[first].parameters(), lr=0.1), steps=2)
        train(model, AdamW(model.parameters()), steps=3)

    steps = [("optimizer", step, 0) for step in range(5)]
    assert numbers(tmp_path / "run", "forward", "2") == steps
    assert numbers(tmp_path / "run", "grad", "2.weight") == steps
    found = open_recording(str(tmp_path / "run")).rank_content(0)["optimizers"]
    assert [(one["name"], one["type"]) for one in found] == [("optimizer", "AdamW")]


def test_an_optimizer_that_was_replaced_is_let_go_of(tmp_path: Path) -> None:
    model = mlp()
    first = AdamW(model.parameters())
    gone = weakref.ref(first)
    with traindiff.record(tmp_path / "run", model, strict=True):
        train(model, first)
        train(model, AdamW(model.parameters()))
        del first
        gc.collect()
        assert gone() is None


def test_an_optimizer_that_was_replaced_may_step_again(tmp_path: Path) -> None:
    model = mlp()
    first = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, strict=True):
        train(model, first)
        for _ in range(2):
            train(model, SGD(model.parameters(), lr=0.1))
            train(model, first)

    assert numbers(tmp_path / "run", "param", "0.weight") == [("optimizer", step, 0) for step in range(5)]


def test_optimizers_of_the_same_parameters_that_were_made_together_have_names_of_their_own(tmp_path: Path) -> None:
    model = mlp()
    first, second = (SGD(model.parameters(), lr=0.1) for _ in range(2))
    with traindiff.record(tmp_path / "run", model, strict=True):
        train(model, first, second, steps=2)

    assert {seen.optimizer for seen, _ in rows(tmp_path / "run")} == {"optimizer", "optimizer[1]"}
