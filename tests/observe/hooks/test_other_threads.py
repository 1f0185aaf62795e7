"""Threads that call the model beside the training, and a training that moves from thread to thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import traindiff
from tests.observe.hooks.reading import rows, unobserved
from traindiff.core.tap_registry import OBSERVABLE


class Gated(nn.Module):
    """Calls a function in the middle of its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
        self.between: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        between, self.between = self.between, lambda: None
        x = self.first(x)
        between()
        found: Tensor = self.last(x)
        return found


def evaluate(called: nn.Module) -> None:
    with torch.no_grad():
        called(torch.ones(5, 3))


def train(path: Path, beside: Callable[[Gated], None] | None, **settings: Any) -> None:
    """Train; `beside` runs on another thread in the middle of a forward pass, and after it."""
    torch.manual_seed(0)
    model = Gated()
    optimizer = SGD(model.parameters(), lr=0.1)
    with ThreadPoolExecutor(1) as other, traindiff.record(path, model, optimizer, strict=True, **settings):

        def wait() -> None:
            if beside is not None:
                with torch.random.fork_rng():
                    other.submit(beside, model).result()

        for step in range(3):
            if step == 1:
                model.between = wait
            loss = model(torch.ones(2, 3)).sum()
            if step == 1:
                wait()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def seen(path: Path) -> list[Any]:
    return [(one, value.tobytes()) for one, value in rows(path)]


def without_random_state(path: Path) -> list[Any]:
    return [(one, value) for one, value in seen(path) if one.path != "rng"]


EVALUATIONS: list[Callable[[Gated], None]] = [evaluate, lambda model: evaluate(model.first)]


@pytest.mark.parametrize("observe", [None, OBSERVABLE])
@pytest.mark.parametrize("beside", EVALUATIONS, ids=["whole", "part"])
def test_an_evaluation_on_another_thread_is_no_part_of_the_training(
    beside: Callable[[Gated], None], observe: Any, tmp_path: Path
) -> None:
    settings = {} if observe is None else {"observe": observe}
    train(tmp_path / "alone", None, **settings)
    train(tmp_path / "beside", beside, **settings)

    assert seen(tmp_path / "beside") == seen(tmp_path / "alone")


def test_an_evaluation_may_begin_before_a_forward_pass_and_end_inside_of_it(tmp_path: Path) -> None:
    def run(path: Path, *, evaluates: bool) -> None:
        torch.manual_seed(0)
        model = Gated()
        optimizer = SGD(model.parameters(), lr=0.1)
        begun, goes_on = Event(), Event()
        with ThreadPoolExecutor(1) as other, traindiff.record(path, model, optimizer, strict=True):
            for step in range(3):
                if step == 1 and evaluates:
                    model.between = lambda: (begun.set(), goes_on.wait())
                    with torch.random.fork_rng():
                        evaluation = other.submit(evaluate, model.eval())
                        begun.wait()
                    model.train()
                    model.between = lambda ends=evaluation: (goes_on.set(), ends.result())  # type: ignore[misc]
                model.last[0].p = 0.0
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    run(tmp_path / "alone", evaluates=False)
    run(tmp_path / "beside", evaluates=True)

    assert without_random_state(tmp_path / "beside") == without_random_state(tmp_path / "alone")


def test_an_evaluation_that_was_to_be_recorded_is_unknown(tmp_path: Path) -> None:
    train(tmp_path / "run", evaluate, evaluation=True)

    missing = [(one.step, one.phase, one.stage) for one, _ in rows(tmp_path / "run") if one.unobserved]
    assert missing == [(1, "forward", "evaluation")]
    assert "on another thread" in unobserved(tmp_path / "run")[0][2]


def test_passes_of_other_threads_that_keep_gradients_make_a_step_unknown(tmp_path: Path) -> None:
    train(tmp_path / "run", lambda model: model(torch.ones(5, 3)).sum().item())

    assert {one.step for one, _ in rows(tmp_path / "run") if one.unobserved} == {1}
    calls = [(one.step, one.call) for one, _ in rows(tmp_path / "run", phase="forward", path="first")]
    assert [call for call in calls if call[0] != 1] == [(0, 0), (2, 0)]
    assert (1, 1) not in calls


def test_a_training_may_move_from_thread_to_thread(tmp_path: Path) -> None:
    def record(path: Path, run: Callable[..., object]) -> None:
        torch.manual_seed(0)
        model = Gated()
        optimizer = SGD(model.parameters(), lr=0.1)

        def step() -> None:
            for _ in range(2):
                model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        with traindiff.record(path, model, optimizer, strict=True):
            for number in range(4):
                run(number, step)

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        record(tmp_path / "one", lambda _, step: step())
        record(tmp_path / "many", lambda number, step: (first, second)[number % 2].submit(step).result())

    assert unobserved(tmp_path / "many") == []
    assert seen(tmp_path / "many") == seen(tmp_path / "one")


def test_a_thread_that_was_interrupted_leaves_the_training_to_another_one(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    model = Gated()
    optimizer = SGD(model.parameters(), lr=0.1)
    with ThreadPoolExecutor(1) as other, traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        model.between = interrupt
        with pytest.raises(KeyboardInterrupt):
            other.submit(model, torch.ones(2, 3)).result()
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    assert [one.step for one, _ in rows(tmp_path / "run", phase="loss")] == [0, 1]
    assert {one.step for one, _ in rows(tmp_path / "run", phase="forward", path="last")} == {0, 1}
