"""Healthy runs break no rule and give no warning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR

import traindiff
from tests.analyse.rules.small_trainings import classifier, convolutions, images, points, train
from traindiff.run.demo.training import train as train_demo

Prepared = tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]


def adamw(model: nn.Module, **settings: Any) -> Prepared:
    return model, AdamW(model.parameters(), lr=1e-3, **settings), {}


def warmed_up() -> Prepared:
    model, optimizer, _ = adamw(classifier())
    schedule = LambdaLR(optimizer, lambda step: min(1.0, step / 10) * (1.0 - step / 41))
    return model, optimizer, {"after_step": lambda step: schedule.step(), "clip": 1.0}


def with_frozen_layer(*, held: bool) -> Prepared:
    model = classifier()
    model[0].requires_grad_(False)
    chosen = [one for one in model.parameters() if held or one.requires_grad]
    return model, AdamW(chosen, lr=1e-3), {}


def with_head_of_zeros() -> Prepared:
    model = classifier()
    nn.init.zeros_(model[-1].weight)
    return adamw(model)


def in_float16(scale: float) -> Prepared:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=20)
    model, optimizer, _ = adamw(classifier())
    return model, optimizer, {"autocast": torch.float16, "scaler": scaler, "clip": 1.0}


def evaluated(model: nn.Module, batches: Callable[[int], Any]) -> Prepared:
    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            model(batches(1000 + step)[0])
        model.train()

    settings = {"after_step": evaluate, "evaluation": True, "batches": batches}
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4), settings


def with_settings(model: nn.Module, **settings: Any) -> Prepared:
    return (*adamw(model)[:2], settings)


class Adapted(nn.Module):
    """A frozen linear layer, and a product of two thin ones beside it that begins at 0 (LoRA)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def with_adapters() -> Prepared:
    model = classifier()
    for name, layer in list(model.named_children()):
        if isinstance(layer, nn.Linear):
            model.set_submodule(name, Adapted(layer))
    return model, AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3), {}


RUNS: dict[str, Callable[[], Prepared]] = {
    "AdamW": lambda: adamw(classifier()),
    "weight decay": lambda: adamw(classifier(), weight_decay=0.5),
    "SGD with momentum": lambda: (model := classifier(), SGD(model.parameters(), lr=0.1, momentum=0.9), {}),
    "Tanh": lambda: (model := classifier(nn.Tanh), Adam(model.parameters(), lr=1e-2), {}),
    "Sigmoid": lambda: (model := classifier(nn.Sigmoid), SGD(model.parameters(), lr=0.5), {}),
    "dropout, evaluated": lambda: evaluated(classifier(dropout=0.3), points),
    "warm-up from 0, decay to 0, clipped": warmed_up,
    "bfloat16 autocast": lambda: with_settings(classifier(), autocast=torch.bfloat16),
    "float16 autocast with a scaler": lambda: in_float16(2.0**12),
    "float16, first steps left out": lambda: in_float16(2.0**24),
    "frozen layer": lambda: with_frozen_layer(held=False),
    "frozen layer that the optimizer holds": lambda: with_frozen_layer(held=True),
    "head of zeros": with_head_of_zeros,
    "small batches": lambda: with_settings(classifier(), batches=lambda step: points(step, samples=4)),
    "single samples": lambda: with_settings(classifier(), batches=lambda step: points(step, samples=1)),
    "low-rank adapters": with_adapters,
    "micro-batches": lambda: with_settings(classifier(), micro_batches=2),
    "convolutions": lambda: with_settings(convolutions(), batches=images),
    "convolutions in bfloat16": lambda: with_settings(convolutions(), batches=images, autocast=torch.bfloat16),
    "convolutions, evaluated": lambda: evaluated(convolutions(), images),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_healthy_run_gives_no_finding_and_no_warning(name: str, tmp_path: Path) -> None:
    model, optimizer, settings = RUNS[name]()

    verdict = traindiff.check(train(tmp_path / "run", model, optimizer, steps=40, **settings))

    assert str(verdict) == f"healthy: no rule is broken, over 40 steps (0 to 39)\n\n{verdict.rules_sentence()}"
    assert (verdict.findings, verdict.warnings, verdict.notes) == ((), (), ())


def test_steps_that_a_scaler_rightly_leaves_out_are_there_to_be_judged(tmp_path: Path) -> None:
    model, optimizer, settings = in_float16(2.0**24)
    train(tmp_path / "run", model, optimizer, steps=3, **settings)

    rows = [one for step in traindiff.open_recording(tmp_path / "run").steps(0) for one in step.observations]

    assert [one.step for one in rows if one.slot == "skipped"]


@pytest.mark.parametrize(("micro_batches", "steps"), [(1, 24), (4, 8)])
def test_the_demo_is_healthy(micro_batches: int, steps: int, tmp_path: Path) -> None:
    train_demo(tmp_path / "run", steps=steps, micro_batches=micro_batches)

    verdict = traindiff.check(tmp_path / "run")

    assert (verdict.verdict, verdict.findings, verdict.warnings, verdict.notes) == ("healthy", (), (), ())
