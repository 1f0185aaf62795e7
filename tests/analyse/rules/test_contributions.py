"""Gradients that lack what micro-steps contributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import traindiff
from tests.analyse.rules.small_trainings import classifier, found, kinds, points
from traindiff.analyse.check import Verdict
from traindiff.core.tap_registry import OBSERVED_BY_DEFAULT

OBSERVED = [*OBSERVED_BY_DEFAULT, "grad.micro"]

Between = Callable[[nn.Module, int, int], None]
"""What a training does after the backward pass of a micro-step: given the model, the step and the micro-step."""


def nothing(_model: nn.Module, _step: int, _micro_step: int) -> None:
    """Does nothing."""


def trained(
    path: Path, *, micro_steps: int = 1, between: Between = nothing, clip: float | None = None,
    dtype: torch.dtype = torch.float32, before_optimizer: Callable[[nn.Module], None] = lambda model: None,
    observe: Sequence[str] = OBSERVED,
) -> Verdict:  # fmt: skip
    """What is said of a training."""
    model = classifier().to(dtype)
    optimizer = SGD(model.parameters(), lr=0.01)
    with traindiff.record(path, model, optimizer, observe=observe, strict=True):
        for step in range(8):
            optimizer.zero_grad()
            for micro_step in range(micro_steps):
                inputs, labels = points(step * micro_steps + micro_step)
                (functional.cross_entropy(model(inputs.to(dtype)), labels) / micro_steps).backward()
                between(model, step, micro_step)
            before_optimizer(model)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return traindiff.check(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_gradients_that_add_up_are_right(
    micro_steps: int, clip: float | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    verdict = trained(tmp_path / "run", micro_steps=micro_steps, clip=clip, dtype=dtype)

    assert "lost-contribution" not in kinds(verdict)


def forget(model: nn.Module, _step: int, micro_step: int) -> None:
    if micro_step < 2:
        model.zero_grad()


def look_only(model: nn.Module, _step: int, micro_step: int) -> None:
    if micro_step == 0:
        model.zero_grad()


@pytest.mark.parametrize(("between", "lost"), [(forget, [0, 1]), (look_only, [0])])
def test_micro_steps_that_do_not_count_are_a_warning(between: Between, lost: list[int], tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", micro_steps=3, between=between)

    finding = found(verdict, "lost-contribution")
    assert verdict.verdict == "healthy"
    assert finding.evidence["lost"] == lost
    assert "zero_grad() called inside the loop" in finding.message


def noise(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad += 0.3 * parameter.grad.std() * torch.randn_like(parameter.grad)


def by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def decay(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad += 0.1 * parameter.detach()


def centered(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.dim() > 1:
            parameter.grad -= parameter.grad.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("change", [noise, by_value, decay, centered])
def test_gradients_that_a_training_changes_on_purpose_are_not_judged(
    change: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    verdict = trained(tmp_path / "run", micro_steps=2, before_optimizer=change)

    assert "lost-contribution" not in kinds(verdict)


def test_a_gradient_that_fades_from_step_to_step_lacks_nothing(tmp_path: Path) -> None:
    model = classifier()
    optimizer = SGD(model.parameters(), lr=0.01)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVED, strict=True):
        for step in range(8):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 0.9
            functional.cross_entropy(model(points(step)[0]), points(step)[1]).backward()
            optimizer.step()

    assert "lost-contribution" not in kinds(traindiff.check(tmp_path / "run"))


def test_backward_passes_of_two_optimizers_through_one_model_are_legal(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models: dict[str, Any] = {
        "generator": nn.Linear(8, 20),
        "discriminator": nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1)),
    }
    optimizers = {name: SGD(model.parameters(), lr=0.01) for name, model in models.items()}
    with traindiff.record(tmp_path / "run", models, optimizers, observe=OBSERVED, strict=True):
        for step in range(8):
            real: Tensor = points(step)[0]
            made = models["generator"](torch.randn(32, 8))
            optimizers["discriminator"].zero_grad()
            for batch, sign in ((real, 1.0), (made.detach(), -1.0)):
                functional.softplus(-sign * models["discriminator"](batch)).mean().backward()
            optimizers["discriminator"].step()
            optimizers["generator"].zero_grad()
            functional.softplus(-models["discriminator"](made)).mean().backward()
            optimizers["generator"].step()

    assert "lost-contribution" not in kinds(traindiff.check(tmp_path / "run"))


def subtracts(kept: dict[int, list[Tensor]]) -> Between:
    """Takes what the first micro-step contributed away from all gradients, as a broken accumulation does."""

    def between(model: nn.Module, step: int, micro_step: int) -> None:
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        if micro_step == 0:
            kept[step] = [one.clone() for one in gradients]
        elif micro_step == 2:
            for one, first in zip(gradients, kept[step], strict=True):
                one.sub_(first)

    return between


@pytest.mark.parametrize("between", [forget, subtracts({})], ids=["cleared", "subtracted"])
def test_the_witness_and_the_contributions_name_a_fault_once(between: Between, tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", micro_steps=3, between=between, observe=[*OBSERVED, "witness"])

    lost = [
        one
        for one in (*verdict.findings, *verdict.warnings)
        if "lacks what" in one.message or "lack what" in one.message
    ]
    paths = [one.path for one in lost]
    assert lost
    assert len(paths) == len(set(paths))
    assert len({one.kind for one in lost}) == 1
