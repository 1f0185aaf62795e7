"""Layers that autocast misses, stages that should be frozen, and optimizers whose parameters all are."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam

import traindiff
from tests.analyse.rules.small_trainings import classifier, convolutions, found, images, kinds, points, train
from traindiff.analyse.check import Verdict


class Sometimes(nn.Linear):
    """A linear layer that can compute in float32 under autocast."""

    exact = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not self.exact):
            return functional.linear(x.float() if self.exact else x, self.weight, self.bias)


class Layers(nn.Module):
    """Layers of one kind in a list, and norms between them."""

    def __init__(self, exact: Collection[int], *, count: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(20, 32)
        self.layers = nn.ModuleList(Sometimes(32, 32) for _ in range(count))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(count))
        self.head = nn.Linear(32, 4)
        for number in exact:
            self.layers[number].exact = True  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + functional.gelu(layer(norm(x)))
        logits: Tensor = self.head(x)
        return logits


def under_autocast(path: Path, model: nn.Module, dtype: torch.dtype | None = torch.bfloat16) -> Verdict:
    """What is said of a training under autocast, or without."""
    return traindiff.check(train(path, model, SGD(model.parameters(), lr=0.02), steps=6, autocast=dtype))


def test_one_layer_that_autocast_misses_is_a_warning(tmp_path: Path) -> None:
    torch.manual_seed(0)
    verdict = under_autocast(tmp_path / "run", Layers([2]))

    finding = found(verdict, "missed-by-autocast")
    assert verdict.verdict == "healthy"
    assert (finding.step, finding.phase, finding.path) == (0, "forward", "layers.2")
    assert "3 of the 4 layers like it (layers.*) return bfloat16" in finding.message


@pytest.mark.parametrize("exact", [[], [0], [3], [0, 3], [0, 1, 2], [0, 1, 2, 3]])
def test_first_and_last_layers_and_most_layers_may_be_in_float32(exact: list[int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert kinds(under_autocast(tmp_path / "run", Layers(exact))) == set()


def test_without_autocast_there_is_nothing_to_miss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert kinds(under_autocast(tmp_path / "run", Layers([2]).bfloat16().float(), None)) == set()


class Backbone(nn.Module):
    """Convolutions that freeze their first stages when they are put into training mode."""

    def __init__(self, frozen_stages: int) -> None:
        super().__init__()
        self.frozen_stages = frozen_stages
        self.body = convolutions()

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        for stage in list(self.body)[: self.frozen_stages if self.frozen_stages > 0 else 0]:
            stage.requires_grad_(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)
        return logits


def backbone(path: Path, frozen_stages: int, *, called: bool, thaw: int = 100) -> Verdict:
    """What is said of a training with such a backbone; it may be thawed at a step."""
    model = nn.Sequential(Backbone(frozen_stages))
    if called:
        model.train()

    def before_step(step: int) -> None:
        if step >= thaw:
            model.requires_grad_(True)

    optimizer = SGD(model.parameters(), lr=0.01)
    return traindiff.check(train(path, model, optimizer, steps=6, batches=images, before_step=before_step))


def test_stages_that_nobody_froze_are_a_warning(tmp_path: Path) -> None:
    verdict = backbone(tmp_path / "run", 2, called=False)

    finding = found(verdict, "frozen-stages")
    assert verdict.verdict == "healthy"
    assert (finding.step, finding.phase, finding.evidence["frozen_stages"]) == (0, "grad", 2)
    assert finding.message.startswith("0 has frozen_stages = 2, and all of its 10 parameters have gradients")


@pytest.mark.parametrize(("stages", "called"), [(2, True), (-1, False), (0, False), (-1, True)])
def test_frozen_stages_and_none_to_freeze_are_right(stages: int, called: bool, tmp_path: Path) -> None:
    assert "frozen-stages" not in kinds(backbone(tmp_path / "run", stages, called=called))


def test_stages_may_be_thawed_later(tmp_path: Path) -> None:
    assert "frozen-stages" not in kinds(backbone(tmp_path / "run", 2, called=True, thaw=3))


def test_an_optimizer_of_frozen_parameters_is_found(tmp_path: Path) -> None:
    model = classifier()
    optimizer = Adam(model[4].parameters(), lr=0.01)
    model[4].requires_grad_(False)

    verdict = traindiff.check(train(tmp_path / "run", model, optimizer, steps=12))

    finding = found(verdict, "idle-optimizer")
    assert (finding.step, finding.evidence["num_parameters"]) == (0, 2)
    assert "none of its 2 parameters requires a gradient (requires_grad=False)" in finding.message


def test_an_optimizer_with_some_frozen_parameters_is_right(tmp_path: Path) -> None:
    model = classifier()
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
    optimizer = Adam(model.parameters(), lr=0.01)

    assert kinds(traindiff.check(train(tmp_path / "run", model, optimizer, steps=12))) == set()


def test_an_optimizer_whose_parameters_are_thawed_later_is_right(tmp_path: Path) -> None:
    model = classifier()
    body, head = Adam(model[:4].parameters(), lr=0.01), Adam(model[4].parameters(), lr=0.01)
    model[:4].requires_grad_(False)
    with traindiff.record(tmp_path / "run", model, {"head": head, "body": body}, strict=True):
        for step in range(24):
            if step == 14:
                model[:4].requires_grad_(True)
            model.zero_grad()
            inputs, labels = points(step)
            functional.cross_entropy(model(inputs), labels).backward()
            head.step()
            body.step()

    assert kinds(traindiff.check(tmp_path / "run")) == set()
