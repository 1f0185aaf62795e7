"""Trainings whose parameters and optimizer state are in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import triplet_margin_loss

import traindiff

BF16 = torch.bfloat16


def regressed(path: Path, *, alpha: float = 0.99, foreach: bool = False, lr: float = 1e-3) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.LeakyReLU(0.2), nn.Linear(24, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
    model = model.to(BF16)
    optimizer = torch.optim.RMSprop(model.parameters(), lr, alpha=alpha, foreach=foreach)
    with traindiff.record(path, model, optimizer):
        for step in range(8):
            data = torch.Generator().manual_seed(step)
            x, y = torch.randn(20, 8, generator=data).to(BF16), torch.randn(20, generator=data)
            (model(x).squeeze(1).float() - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_a_running_average_keeps_what_it_was_rounded_by(tmp_path: Path) -> None:
    """It is rounded in each step, once in one implementation and twice in the other."""
    found = traindiff.compare(regressed(tmp_path / "a"), regressed(tmp_path / "b", foreach=True))

    assert found.verdict == "equivalent", str(found)
    assert found.first_bit_difference is not None


def test_another_decay_of_a_running_average_is_still_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = regressed(tmp_path / "a")
    step = torch.optim.RMSprop.step

    def decayed(self: torch.optim.RMSprop) -> None:
        step(self)
        for state in self.state.values():
            state["square_avg"].mul_(0.98)

    monkeypatch.setattr(torch.optim.RMSprop, "step", decayed)
    found = traindiff.compare(base, regressed(tmp_path / "b"))

    assert found.verdict == "diverged", str(found)
    assert found.first_divergence is not None
    assert (found.first_divergence.phase, found.first_divergence.slot) == ("optimizer", "square_avg")


def embedded(path: Path, *, at_once: bool = False, factor: float = 1.0) -> Path:
    """The loss is of differences, so the gradient of the last bias is mathematically zero."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(128, 16),
    ).to(BF16)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    with traindiff.record(path, model, optimizer):
        for step in range(5):
            data = torch.Generator().manual_seed(step)
            given = [torch.randn(6, 1, 12, 12, generator=data).to(BF16) for _ in range(3)]
            made: list[Tensor] = list(model(torch.cat(given)).chunk(3)) if at_once else [model(one) for one in given]
            (triplet_margin_loss(*(one.float() for one in made)) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_updates_that_are_only_noise_do_not_tell_runs_apart_where_one_loses_them(tmp_path: Path) -> None:
    base, other = embedded(tmp_path / "a"), embedded(tmp_path / "b", at_once=True)

    found = traindiff.compare(base, other)

    assert found.verdict == "equivalent", str(found)
    for path in (base, other):
        assert traindiff.check(path).verdict == "healthy"


def test_a_factor_behind_one_call_instead_of_three_is_still_found(tmp_path: Path) -> None:
    found = traindiff.compare(embedded(tmp_path / "a"), embedded(tmp_path / "b", at_once=True, factor=1.2))

    assert found.verdict == "diverged", str(found)


def test_lost_updates_are_a_warning(tmp_path: Path) -> None:
    verdict = traindiff.check(regressed(tmp_path / "a", lr=1e-6))

    assert verdict.verdict == "healthy"
    assert {one.kind for one in verdict.warnings} >= {"lost-update"}
