"""Forward passes that an interrupt ends: torch calls no hook after these."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import traindiff
from tests.observe.hooks.reading import row, rows, unobserved
from traindiff.core.observation import Observation

INTERRUPTS = [KeyboardInterrupt, asyncio.CancelledError]


class Stage(nn.Linear):
    """Raises an error once."""

    error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return super().forward(x)


def interrupted(model: nn.Module, x: Tensor, error: type[BaseException]) -> None:
    """Call a model whose last stage raises the error."""
    last = [one for one in model.modules() if isinstance(one, Stage)][-1]
    last.error = error
    with pytest.raises(error):
        model(x)


def seen(path: Path) -> list[Observation]:
    """What was observed, without the random state after passes, which the one that was interrupted lacks."""
    return [one for one, _ in rows(path) if not (one.path == "rng" and one.stage == "after")]


def without_order(found: list[Observation]) -> list[Any]:
    return [(one.step, one.micro_step, one.phase, one.stage, one.path, one.slot, one.call, one.shard) for one in found]


def train(path: Path, error: type[BaseException], *, evaluates: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Stage(3, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer, strict=True, evaluation=True) as run:
        for step in range(4):
            if step == 1:
                with torch.set_grad_enabled(not evaluates):
                    interrupted(model, torch.ones(5, 3), error)
            if step == 2:
                with torch.no_grad():
                    model(torch.ones(7, 3))
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log("step", step)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_an_interrupted_pass_leaves_what_one_leaves_that_an_error_ends(
    interrupt: type[BaseException], evaluates: bool, tmp_path: Path
) -> None:
    train(tmp_path / "error", RuntimeError, evaluates=evaluates)
    train(tmp_path / "interrupt", interrupt, evaluates=evaluates)

    assert without_order(seen(tmp_path / "interrupt")) == without_order(seen(tmp_path / "error"))
    assert [float(value["sum"]) for _, value in rows(tmp_path / "interrupt", path="step")] == [0, 1, 2, 3]
    assert [one.step for one, _ in rows(tmp_path / "interrupt", path="step")] == [0, 1, 2, 3]


def test_a_number_that_is_logged_after_an_interrupted_evaluation_belongs_to_the_step_before(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Stage(3, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True) as run:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            interrupted(model, torch.ones(2, 3), KeyboardInterrupt)
        run.log("value", 1.0)

    assert row(tmp_path / "run", path="value")[0].step == 0


@pytest.mark.parametrize("interrupt", INTERRUPTS)
def test_other_models_are_seen_after_one_was_interrupted(interrupt: type[BaseException], tmp_path: Path) -> None:
    first, second = nn.Sequential(Stage(3, 3)), nn.Sequential(nn.Linear(3, 1))
    optimizers = [SGD(one.parameters(), lr=0.1) for one in (first, second)]
    with traindiff.record(tmp_path / "run", {"g": first, "d": second}, optimizers, strict=True):
        for step in range(3):
            if step == 1:
                interrupted(first, torch.ones(2, 3), interrupt)
            second(first(torch.ones(2, 3))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    found = rows(tmp_path / "run", path="d", slot="input[0]")
    assert [(one.step, one.call) for one, _ in found] == [(0, 0), (1, 0), (2, 0)]
    assert unobserved(tmp_path / "run") == []


class Patient(nn.Module):
    """Goes on if its part is interrupted, and trains inside of its forward pass."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.optimizer = SGD(part.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        interrupted(self.part, x, KeyboardInterrupt)
        loss = self.part(x).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]


def test_a_pass_goes_on_that_steps_an_optimizer_or_catches_an_interrupt_of_a_part(tmp_path: Path) -> None:
    model = Patient(nn.Sequential(Stage(3, 1)))
    inside = []
    with traindiff.record(tmp_path / "run", {"whole": model, "part": model.part}, model.optimizer, strict=True) as run:
        model.register_forward_hook(lambda *_: inside.append(run._progress.in_forward), prepend=True)
        for _ in range(2):
            model(torch.ones(2, 3))
            inside.append(run._progress.in_forward)

    assert inside == [True, False, True, False]
    assert run.steps == {"optimizer": 2}
