"""Gradients that were not set to zero, are one step old, or lack a micro-batch: whatever clipping makes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from traindiff.analyse.compare import Comparison
from traindiff.analyse.findings import Finding
from traindiff.core.tap_registry import OBSERVED_BY_DEFAULT

AT = 2
Change = Callable[[int, nn.Module], None]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
    )


MODELS = {"mlp": mlp, "convolutions": convolutions}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
}
CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "unclipped": lambda model: None,
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    "loose": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 100.0),
}


def samples(step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, generator=draw), torch.randn(size, 3, generator=draw)


def nothing(step: int, model: nn.Module) -> None:
    """Changes nothing."""


def trained(
    path: Path, *, model: str = "mlp", optimizer: str = "sgd", clip: str = "norm", keeps: int | None = None,
    change: Change = nothing, lost: tuple[int, ...] = (), forgets: int | None = None, micro: int = 1,
    scale: float = 1.0, dtype: torch.dtype = torch.float32, observe: tuple[str, ...] = (),
) -> Path:  # fmt: skip
    """A training that may keep the gradients of one step, change them, or lose micro-batches of one step."""
    torch.manual_seed(0)
    net = MODELS[model]().to(dtype)
    stepper = OPTIMIZERS[optimizer](net.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=scale != 1.0, init_scale=scale)
    more = {"observe": [*OBSERVED_BY_DEFAULT, *observe]} if observe else {}
    with traindiff.record(path, net, stepper, **more):
        for step in range(4):
            x, y = (one.to(dtype).chunk(micro) for one in samples(step))
            for number in range(micro):
                if step == AT and number in lost:
                    continue
                loss = (net(x[number]) - y[number]).square().mean() / micro
                scaler.scale(loss).backward()
                if (step, number) == (AT, forgets):
                    stepper.zero_grad()
            if scaler.is_enabled():
                scaler.unscale_(stepper)
            change(step, net)
            CLIPS[clip](net)
            scaler.step(stepper)
            scaler.update()
            if step != keeps:
                stepper.zero_grad()
    return path


def first_of(comparison: Comparison) -> Finding:
    assert comparison.first_divergence is not None
    return comparison.first_divergence


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("clip", CLIPS)
def test_a_zero_grad_that_was_left_out_is_named(tmp_path: Path, clip: str, model: str, optimizer: str) -> None:
    about = {"clip": clip, "model": model, "optimizer": optimizer}
    found = traindiff.compare(trained(tmp_path / "a", **about), trained(tmp_path / "b", keeps=AT - 1, **about))

    first = first_of(found)
    assert (first.step, first.phase, first.kind) == (AT, "grad", "accumulated")
    assert "was zero_grad() left out after that" in first.message
    assert all(one.kind == "accumulated" for one in found.findings if one.phase == "grad" and one.step == AT)


def test_a_zero_grad_that_was_left_out_under_a_small_loss_scale_is_named(tmp_path: Path) -> None:
    found = traindiff.compare(trained(tmp_path / "a", scale=4.0), trained(tmp_path / "b", scale=4.0, keeps=AT - 1))

    assert "was zero_grad() left out after that, and the sum clipped or unscaled?" in first_of(found).message


def stale(held: dict[str, Tensor], path: str, factor: float = 1.0) -> Change:
    def change(step: int, model: nn.Module) -> None:
        gradient = model.get_parameter(path).grad
        assert gradient is not None
        fresh = gradient.clone()
        if step == AT:
            gradient.copy_(held["before"] * factor)
        held["before"] = fresh

    return change


@pytest.mark.parametrize("clip", CLIPS)
def test_a_gradient_of_the_step_before_is_named_whatever_clipping_does(tmp_path: Path, clip: str) -> None:
    candidate = trained(tmp_path / "b", clip=clip, change=stale({}, "0.weight"))
    found = traindiff.compare(trained(tmp_path / "a", clip=clip), candidate)

    first = first_of(found)
    assert (first.step, first.phase, first.path, first.kind) == (AT, "grad", "0.weight", "late")
    assert "the baseline has in the step before: one step late" in first.message


def add_noise(step: int, model: nn.Module) -> None:
    if step == AT:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(torch.randn_like(parameter.grad) * parameter.grad.norm() * 0.1)


def mix(step: int, model: nn.Module, *, held: dict[str, Tensor]) -> None:
    """A mean of two steps' gradients that favors the one before: no missing zero_grad."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        fresh = parameter.grad.clone()
        if step == AT:
            parameter.grad.mul_(0.1).add_(held[name], alpha=0.9)
        held[name] = fresh


def test_other_wrong_gradients_are_not_said_to_be_of_the_step_before(tmp_path: Path) -> None:
    baseline = trained(tmp_path / "a")
    noisy = traindiff.compare(baseline, trained(tmp_path / "b", change=add_noise))
    assert not [one for one in noisy.findings if "step before" in one.message]
    mixed = traindiff.compare(baseline, trained(tmp_path / "c", change=partial(mix, held={})))
    assert "are gradients of several steps mixed?" in first_of(mixed).message
    assert not [one for one in mixed.findings if "zero_grad" in one.message]


def test_one_batch_for_all_steps_tells_no_step_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = samples(0)
    monkeypatch.setattr(f"{__name__}.samples", lambda step: drawn)

    def double(step: int, model: nn.Module) -> None:
        if step == AT:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(2)

    baseline = trained(tmp_path / "a", clip="unclipped")
    found = traindiff.compare(baseline, trained(tmp_path / "b", clip="unclipped", change=double))

    assert "All gradients are 2 x the baseline's" in first_of(found).message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("clip", CLIPS)
def test_a_micro_batch_that_is_not_computed_is_named(
    tmp_path: Path, dtype: torch.dtype, scale: float, clip: str
) -> None:
    about = {"dtype": dtype, "scale": scale, "clip": clip, "micro": 4}
    found = traindiff.compare(trained(tmp_path / "a", **about), trained(tmp_path / "b", lost=(1,), **about))

    first = first_of(found)
    assert (found.verdict, first.step, first.phase) == ("misaligned", AT, "batch")
    assert first.message.endswith("4 of the baseline's 16 samples are missing, all of micro-step 1.")
    assert "batch_axis" not in str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("micro", [2, 4])
def test_a_micro_batch_whose_gradient_is_lost_is_named(
    tmp_path: Path, dtype: torch.dtype, scale: float, clip: str, micro: int
) -> None:
    about = {
        "dtype": dtype, "scale": scale, "clip": clip, "micro": micro, "optimizer": "adamw", "observe": ("grad.micro",)
    }  # fmt: skip
    found = traindiff.compare(trained(tmp_path / "a", **about), trained(tmp_path / "b", forgets=0, **about))

    first = first_of(found)
    assert (first.step, first.phase, first.kind) == (AT, "grad", "lost-contribution")
    assert f"lacks what micro-step 0 of {micro} contributed" in first.message


@pytest.mark.parametrize("clip", CLIPS)
def test_without_micro_gradients_a_lost_one_is_found_all_the_same(tmp_path: Path, clip: str) -> None:
    about = {"clip": clip, "micro": 4}
    found = traindiff.compare(trained(tmp_path / "a", **about), trained(tmp_path / "b", forgets=0, **about))

    assert (first_of(found).step, first_of(found).phase) == (AT, "grad")
    assert "the gradients of micro-step 0 were cleared before the step read them" in first_of(found).message


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        self.critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(), nn.Linear(16, 1))

    def forward(self, noise: Tensor) -> Tensor:
        return self.critic(self.generator(noise))


def adversaries(path: Path, *, keeps: int | None = None, clip: float = 1e9) -> Path:
    """Two optimizers, each of which sets its own gradients to zero; the critic's may forget to."""
    torch.manual_seed(0)
    model = Adversaries()
    optimizers = {
        name: torch.optim.Adam(getattr(model, name).parameters(), lr=1e-2) for name in ("generator", "critic")
    }
    with traindiff.record(path, model, optimizers):
        for step in range(4):
            draw = torch.Generator().manual_seed(step)
            real, noise = torch.randn(8, 6, generator=draw), torch.randn(8, 4, generator=draw)
            with torch.no_grad():
                made = model.generator(noise)
            (model.critic(made).mean() - model.critic(real).mean()).backward()
            nn.utils.clip_grad_norm_(model.critic.parameters(), clip)
            optimizers["critic"].step()
            if step != keeps:
                optimizers["critic"].zero_grad()
            for parameter in model.critic.parameters():
                parameter.requires_grad_(False)
            (-model(noise).mean()).backward()
            optimizers["generator"].step()
            optimizers["generator"].zero_grad()
            for parameter in model.critic.parameters():
                parameter.requires_grad_(True)
    return path


@pytest.mark.parametrize("clip", [1e9, 0.05])
def test_of_several_optimizers_each_has_a_step_before(tmp_path: Path, clip: float) -> None:
    found = traindiff.compare(
        adversaries(tmp_path / "a", clip=clip), adversaries(tmp_path / "b", keeps=AT - 1, clip=clip)
    )

    first = first_of(found)
    assert (first.step, first.phase, first.kind) == (AT, "grad", "accumulated")
    assert first.path.startswith("critic.")
