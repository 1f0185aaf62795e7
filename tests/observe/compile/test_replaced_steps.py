"""An optimizer whose `step` the training has replaced by a compiled, wrapped or partial one before it is recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

import traindiff
from traindiff.storage import open_recording

Step = Callable[..., Any]


def as_it_is(step: Step) -> Step:
    return step


def compiled(step: Step) -> Step:
    replaced: Step = torch.compile(step, backend="eager")
    return replaced


def wrapped(step: Step) -> Step:
    @wraps(step)
    def replaced(*args: Any, **named: Any) -> Any:
        return step(*args, **named)

    return replaced


def trained(path: Path, replace: Callable[[Step], Step], *, compile_model: bool = False) -> Path:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    called = torch.compile(model, backend="eager") if compile_model else model
    optimizer = Adam(model.parameters(), lr=1e-2)
    optimizer.step = replace(optimizer.step)  # type: ignore[method-assign]
    with traindiff.record(path, model, optimizer):
        for step in range(4):
            called(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by torch, while it compiles
@pytest.mark.parametrize("compile_model", [True, False])
@pytest.mark.parametrize("replace", [compiled, wrapped, partial])
def test_each_step_is_counted_once(replace: Callable[[Step], Step], compile_model: bool, tmp_path: Path) -> None:
    path = trained(tmp_path / "c", replace, compile_model=compile_model)
    found = traindiff.compare(trained(tmp_path / "b", as_it_is), path)

    assert [one.step for one in open_recording(str(path)).steps(0)] == [0, 1, 2, 3]
    assert found.verdict in ("identical", "equivalent")
    assert traindiff.check(path).verdict == "healthy"
