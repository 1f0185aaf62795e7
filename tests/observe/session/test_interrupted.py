"""Signals that come while a tensor is summarized, and modules that are called on several threads at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.observe.hooks.reading import rows
from traindiff.core.kernels.cpu import memory

WIDE, NARROW = 40_000, 10


class Branch(nn.Module):
    """Returns as many ones, or other numbers, as it has."""

    def __init__(self, size: int, number: float) -> None:
        super().__init__()
        self.size, self.number = size, number
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, given: Tensor) -> Tensor:
        return given.new_full((self.size,), self.number) * self.weight


class Handlers:
    """Handlers of a signal, of all kinds that Python has."""

    def method(self, *_: object) -> None:
        raise TimeoutError("by the training")

    def __call__(self, *_: object) -> None:
        raise TimeoutError("by the training")


def function(*_: object) -> None:
    raise TimeoutError("by the training")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("handler", [function, Handlers().method, Handlers(), interrupt])
@pytest.mark.parametrize("step", [0, 3])
def test_an_error_of_a_signal_reaches_the_training_and_the_recording_goes_on(
    handler: Callable[..., Any], step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when native code has returned and before its row is noted, as Python lets it come."""
    model = nn.Sequential(Branch(WIDE, 1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    is_due = False
    whole = memory.whole

    def interrupted(dtype: str) -> Callable[..., None]:
        write = whole(dtype)

        def call(*arguments: Any) -> None:
            nonlocal is_due
            write(*arguments)
            if is_due:
                is_due = False
                signal.raise_signal(signal.SIGUSR1)

        return call

    monkeypatch.setattr(memory, "whole", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    raised: BaseException | None = None
    try:
        with traindiff.record(tmp_path / "run", model, optimizer):
            for number in range(5):
                is_due = number == step
                try:
                    model(torch.ones(1)).sum().backward()
                except (TimeoutError, KeyboardInterrupt) as error:
                    assert number == step
                    raised = error
                    model(torch.ones(1)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert isinstance(raised, KeyboardInterrupt if handler is interrupt else TimeoutError)
    outputs = rows(tmp_path / "run", phase="forward", path="0", slot="output[0]")
    assert {seen.step for seen, _ in outputs} == set(range(5))
    assert {(int(summary["count"]), float(summary["sum"])) for _, summary in outputs} == {(WIDE, float(WIDE))}
    assert traindiff.check(tmp_path / "run").verdict == "healthy"


class TwoThreads(nn.Module):
    """Calls a module on another thread, which is at work when this one calls another module."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = Branch(WIDE, 2.0), Branch(NARROW, 3.0)
        self.is_inside, self.may_go_on = threading.Event(), threading.Event()

    def forward(self, given: Tensor) -> Tensor:
        self.is_inside.clear()
        self.may_go_on.clear()
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(self.wide(given)))
        thread.start()
        self.is_inside.wait(10)
        narrow = self.narrow(given)
        self.may_go_on.set()
        thread.join()
        return found[0].sum() + narrow.sum()


def test_modules_on_two_threads_have_their_own_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = TwoThreads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    main, whole = threading.current_thread(), memory.whole

    def waiting(dtype: str) -> Callable[..., None]:
        write = whole(dtype)

        def call(*arguments: Any) -> None:
            write(*arguments)
            if threading.current_thread() is not main and not model.is_inside.is_set():
                model.is_inside.set()
                model.may_go_on.wait(10)

        return call

    monkeypatch.setattr(memory, "whole", waiting)
    with traindiff.record(tmp_path / "run", model, optimizer, observe={"forward"}):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1)).backward()
            optimizer.step()

    for path, size, number in (("wide", WIDE, 2.0), ("narrow", NARROW, 3.0)):
        found = [
            (int(summary["count"]), float(summary["maximum"]))
            for seen, summary in rows(tmp_path / "run", phase="forward", path=path, slot="output[0]")
            if not seen.unobserved
        ]
        assert set(found) <= {(size, number)}
        assert path == "wide" or len(found) == 4
