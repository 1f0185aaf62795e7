"""Whole trainings in each replica: the GPT of the demo, a ConvNet with BatchNorm, an LSTM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import traindiff
from traindiff.run.demo import training
from traindiff.run.demo.loop import DemoSettings
from traindiff.run.demo.model import ModelSize

REPLICAS = ("ulp:1", "reorder:1", "float64")

SMALL = DemoSettings(size=ModelSize(num_layers=2, width=40, num_heads=2, context=16), batch_size=4)


def gpt(path: Path, replica: str | None, *, micro_batches: int) -> list[float]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traindiff, "record", partial(traindiff.record, replica=replica, strict=True))
        numbers = training.train(path, steps=4, settings=SMALL, micro_batches=micro_batches)
    return [number.loss for number in numbers]


class ConvNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 10),
        )  # fmt: skip

    @staticmethod
    def batch(step: int) -> Tensor:
        return torch.randn(8, 3, 10, 10, generator=torch.Generator().manual_seed(step))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 12, num_layers=2, batch_first=True, dropout=0.1), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])

    @staticmethod
    def batch(step: int) -> Tensor:
        return torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(step))


def fit(make: Callable[[], nn.Module], path: Path, replica: str | None) -> list[float]:
    torch.manual_seed(0)
    model = make()
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    labels, losses = torch.arange(8), []
    with traindiff.record(path, model, optimizer, strict=True, replica=replica) as run:
        for step in range(3):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(model.batch(step)), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            run.log("loss", losses[-1])
    return losses


TRAININGS: dict[str, Callable[[Path, str | None], list[float]]] = {
    "gpt": partial(gpt, micro_batches=1),
    "accumulation": partial(gpt, micro_batches=2),
    "conv": partial(fit, ConvNet),
    "lstm": partial(fit, Recurrent),
}


@pytest.mark.parametrize("replica", REPLICAS)
@pytest.mark.parametrize("name", TRAININGS)
def test_a_replica_trains_as_the_baseline_does_within_rounding(name: str, replica: str, tmp_path: Path) -> None:
    expected = TRAININGS[name](tmp_path / "base", None)

    actual = TRAININGS[name](tmp_path / "run", replica)

    assert actual == pytest.approx(expected, rel=2e-6)
    comparison = traindiff.compare(tmp_path / "base", tmp_path / "run")
    assert comparison.verdict == "equivalent", str(comparison)  # and not "identical"
    assert comparison.unaligned == ((), ())
