"""A step of an optimizer is one step, whichever classes take part in it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import traindiff


class Sgd(torch.optim.SGD):
    """Calls the step of its base class, which torch has wrapped too as soon as there is one of those."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)


def steps_of(path: Path, optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    with traindiff.record(path, model, optimizer, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    return len(list(traindiff.open_recording(str(path)).steps(0)))


def test_a_subclass_that_calls_its_bases_step_takes_one_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    torch.optim.SGD(model.parameters(), lr=0.1)  # from now on torch wraps the step of the base class

    assert steps_of(tmp_path / "run", Sgd(model.parameters(), lr=0.1), model) == 3
    assert traindiff.check(tmp_path / "run").verdict == "healthy"


def test_a_step_that_raised_does_not_hide_the_next_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raised = False

    def fail(*_: object) -> None:
        nonlocal raised
        if not raised:
            raised = True
            raise RuntimeError("on purpose")

    optimizer.register_step_pre_hook(fail)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            try:
                optimizer.step()
            except RuntimeError:
                optimizer.step()

    assert traindiff.check(tmp_path / "run").steps == (0, 1, 2)


def test_an_optimizer_that_steps_another_counts_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    inner = torch.optim.SGD(model[0].parameters(), lr=0.1)
    outer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    outer.register_step_post_hook(lambda *_: inner.step())
    with traindiff.record(tmp_path / "run", model, {"inner": inner, "outer": outer}, strict=True):
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            outer.step()

    steps = [(step.optimizer, step.step) for step in traindiff.open_recording(str(tmp_path / "run")).steps(0)]
    assert sorted(steps) == [("inner", 0), ("inner", 1), ("outer", 0), ("outer", 1)]
