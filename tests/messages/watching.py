"""What `traindiff.watch` says of settings that it cannot use, and of a training that goes wrong."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import traindiff
from tests.messages.provoking import Chapter
from tests.messages.recording import Small
from tests.watching.trainings import WIDTH, Net

chapter = Chapter("traindiff.watch", [])
situation = chapter.situation


@situation("settings of a watch that are wrong")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {
        "frames": 0, "trace": "first", "abort_after": -1, "on_detect": "rise", "output": 3, "masks": [1],
        "warn": "zero", "keep_inputs": "yes", "file": 7,
    }  # fmt: skip
    traindiff.watch(Small(), **settings)


@situation("a setting of a watch that there is not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.watch(Small(), frame=3)  # type: ignore[call-arg]


@situation("a model that is watched already")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = Small()
    with traindiff.watch(model):
        traindiff.watch(model)


def broken(name: str, break_: Callable[[Any], object], **settings: Any) -> None:
    def provoke(here: Path, patched: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with traindiff.watch(model, optimizer, file=io.StringIO(), **{"output": None, **settings}):
            break_(model)
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.step()

    situation(name)(provoke)


def remove_hooks(model: nn.Module) -> None:
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


broken("a module that makes NaN", lambda model: setattr(model.scale, "factor", math.nan))
broken("code between modules that makes NaN", lambda model: setattr(model, "between", math.nan))
broken("a backward pass that makes NaN", lambda model: setattr(model.steep, "factor", math.nan))
broken("hooks that were removed", remove_hooks)
broken("a training that is to stop", lambda model: None, abort_after=0)
broken(
    "a training that only warns", lambda model: setattr(model.scale, "factor", math.nan), on_detect="warn"
)  # fmt: skip


@situation("tensors that cannot be saved")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "file").write_text("")
    model = Net()
    model.scale.factor = math.nan
    with traindiff.watch(model, output=here / "file", file=io.StringIO()):
        model(torch.ones(2, WIDTH))


@situation("a call of which the inputs are gone")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    from traindiff.watching.replaying import replay

    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.1), Net().steep, nn.Tanh())
    model[2].factor = math.nan
    with traindiff.watch(model, output=here, file=io.StringIO()):
        try:
            model(torch.ones(2, WIDTH)).sum().backward()
        except traindiff.NonFiniteError:
            replay(next(here.iterdir()))
