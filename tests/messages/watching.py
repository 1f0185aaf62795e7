"""What `traindiff.watch` says of settings that it cannot use, and of a training that goes wrong."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import traindiff
from tests.messages.provoking import Chapter
from tests.messages.recording import Small
from tests.observe.nonfinite.trainings import WIDTH, Net, Steep
from traindiff.compat.transformers import DebugOption, DebugUnderflowOverflow
from traindiff.observe.torch.nonfinite.cause import find_cause

chapter = Chapter("traindiff.watch", [])
situation = chapter.situation


@situation("settings of a watch that are wrong")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {
        "frames": 0, "trace": "first", "abort_after": -1, "on_detect": "rise", "output": 3, "masks": [1],
        "nonfinite": [2], "warn": "zero", "keep_inputs": "yes", "file": 7,
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
broken("a watch that was taken off the modules", remove_hooks)
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


def saved(module: nn.Module, here: Path) -> Path:
    """What is saved of a module that makes NaN, forward or backward."""
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.1), module, nn.Tanh())
    with traindiff.watch(model, output=here / "watch", file=io.StringIO()):
        try:
            model(torch.ones(2, WIDTH)).sum().backward()
        except traindiff.NonFiniteError:
            return next((here / "watch").iterdir())
    raise AssertionError("nothing was found")


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0 + torch.randn(x.shape, generator=torch.Generator())


class Ratio(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0


@situation("a call of which the inputs are gone")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    module = Steep()
    module.factor = math.nan
    find_cause(saved(module, here))


@situation("a call of an operator that cannot be written down")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    find_cause(saved(Noise(), here))


@situation("a call that a newer traindiff has saved")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    file = saved(Ratio(), here) / "module.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 2', 1))
    find_cause(file.parent)


@situation("a saved call whose list is damaged")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    file = saved(Ratio(), here) / "module.json"
    file.write_text("{}")
    find_cause(file.parent)


@situation("a saved call whose tensors are damaged")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    file = saved(Ratio(), here) / "tensors.safetensors"
    file.write_bytes(b"no tensors")
    find_cause(file.parent)


@situation("a tensor without elements, in a step that is traced")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    file = io.StringIO()
    model = nn.Sequential(nn.Identity())
    with traindiff.watch(model, trace=(0,), file=file):
        model[0](torch.empty(3, device="meta"))
    return "Printed:\n" + file.getvalue().strip()


def watched_as_in_transformers(batches: int, factor: float, **arguments: Any) -> None:
    model = Net()
    model.scale.factor = factor
    DebugUnderflowOverflow(model, **arguments)
    with redirect_stdout(io.StringIO()):
        for _ in range(batches):
            model(torch.ones(2, WIDTH))


@situation("the detector of transformers finds NaN")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    watched_as_in_transformers(1, math.nan)


@situation("an option of transformers that is none")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    with pytest.raises(ValueError, match="is not a valid") as raised:  # in the words of transformers
        DebugOption("overflow")
    return f"ValueError:\n{raised.value}"


@situation("the detector of transformers is to stop after a batch")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    watched_as_in_transformers(2, 1.0, abort_after_batch_num=1)
