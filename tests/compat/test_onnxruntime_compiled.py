"""Subscribers of a model that `torch.compile` compiles."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from traindiff.compat.onnxruntime import GlobalSubscriberManager, StatisticsSubscriber, inspect_activation
from traindiff.storage import open_recording

STEPS = 12
"""More than there are recompilations before torch gives a function up."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    GlobalSubscriberManager.unsubscribe()
    torch.compiler.reset()


class Model(nn.Module):
    """Two layers, of which what is between them is observed too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(inspect_activation("hidden", torch.relu(self.up(x))))
        return found


def compiled(model: nn.Module) -> nn.Module:
    found: nn.Module = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    return found


def plain(model: nn.Module) -> nn.Module:
    return model


def files(directory: Path, *, before: Callable[[nn.Module], nn.Module], after: Callable[[nn.Module], nn.Module]) -> int:
    """Train a model that is wrapped before or after it is subscribed; returns the number of observations."""
    model = before(Model())
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(directory)])
    model = after(model)
    draws = torch.Generator().manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
        for _ in range(STEPS):
            model(torch.randn(3, 4, generator=draws)).square().sum().backward()
    GlobalSubscriberManager.unsubscribe()
    return sum(len(step.observations) for step in open_recording(directory / "recording").steps(0))


def test_a_compiled_model_has_the_files_of_the_plain_one(tmp_path: Path) -> None:
    assert files(tmp_path / "plain", before=plain, after=plain) == STEPS * 8
    assert files(tmp_path / "compiled", before=plain, after=compiled) == STEPS * 8

    texts = [
        {str(path.relative_to(tmp_path / name)): path.read_text() for path in (tmp_path / name).glob("step_*/*")}
        for name in ("plain", "compiled")
    ]
    assert len(texts[0]) == STEPS * 9
    assert texts[0] == texts[1]


def test_a_model_may_be_subscribed_after_it_is_compiled(tmp_path: Path) -> None:
    assert files(tmp_path / "runs", before=compiled, after=plain) == STEPS * 10  # the compiled model is a module, too
    assert len(list(tmp_path.glob("runs/step_*/order.txt"))) == STEPS
