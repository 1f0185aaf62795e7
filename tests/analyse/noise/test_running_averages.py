"""Running averages of optimizers whose noise is not what one step's rounding leaves in normal numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer, RMSprop

import traindiff

Make = Callable[..., Optimizer]


def trained(
    path: Path, make: Make, *, build: Callable[[], nn.Module], num_steps: int,
    after_step: Callable[[int, Optimizer], None] = lambda *_: None, **settings: Any,
) -> Path:  # fmt: skip
    torch.manual_seed(0)
    model = build()
    optimizer = make(model.parameters())
    data = torch.Generator().manual_seed(1)
    first = next(model.parameters())
    with traindiff.record(path, model, optimizer, **settings):
        for step in range(num_steps):
            batch = torch.randn(16, first.shape[1], generator=data).to(first.dtype)
            model(batch).float().square().mean().backward()
            optimizer.step()
            after_step(step, optimizer)
            optimizer.zero_grad()
    return path


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).bfloat16()


KINDS: dict[str, tuple[Make, dict[str, bool]]] = {
    "adamw": (lambda *given, **how: AdamW(*given, lr=1e-4, **how), {"fused": True}),
    "amsgrad": (lambda *given, **how: Adam(*given, lr=1e-4, betas=(0.9, 0.95), amsgrad=True, **how), {"fused": True}),
    "rmsprop": (lambda *given, **how: RMSprop(*given, lr=1e-5, **how), {"foreach": False}),
}


@pytest.mark.parametrize("every", [2, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_were_not_recorded_round_running_averages_too(kind: str, every: int, tmp_path: Path) -> None:
    """In bfloat16, a fused step rounds a state once, and one by foreach rounds it twice: in each step."""
    make, otherwise = KINDS[kind]
    how: dict[str, Any] = {"build": small, "num_steps": 3 * every + 1, "every": every}
    baseline = trained(tmp_path / "foreach", lambda held: make(held, foreach=True), **how)

    other = trained(tmp_path / "other", lambda held: make(held, **otherwise), **how)

    comparison = traindiff.compare(baseline, other)
    assert comparison.verdict == "equivalent", str(comparison)


@pytest.mark.parametrize("every", [2, 20])
def test_a_state_that_was_lost_in_such_a_step_is_found(every: int, tmp_path: Path) -> None:
    def lose(step: int, optimizer: Optimizer) -> None:
        if step == 2 * every - 1:
            for state in optimizer.state.values():
                state["exp_avg_sq"].zero_()

    how: dict[str, Any] = {"build": small, "num_steps": 3 * every + 1, "every": every}
    baseline = trained(tmp_path / "foreach", AdamW, **how)

    lost = trained(tmp_path / "lost", AdamW, after_step=lose, **how)

    first = traindiff.compare(baseline, lost).first_divergence
    assert first is not None
    assert (first.step, first.phase, first.slot) == (2 * every, "optimizer", "exp_avg_sq"), str(first)


def deep(dtype: torch.dtype) -> nn.Module:
    """Gradients vanish on their way through it, so that their squares are no normal numbers any more."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(72))).to(dtype)


@pytest.mark.parametrize("variation", ["reorder", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_subnormal_second_moments_are_rounded_to_multiples_of_the_smallest_number(
    dtype: torch.dtype, variation: str, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"build": lambda: deep(dtype), "num_steps": 4}
    baseline = trained(tmp_path / "foreach", lambda held: AdamW(held, lr=1e-4, foreach=True), **how)

    if variation == "fused":
        other = trained(tmp_path / "other", lambda held: AdamW(held, lr=1e-4, fused=True), **how)
    else:
        other = trained(tmp_path / "other", lambda held: AdamW(held, lr=1e-4, foreach=True), replica="reorder:1", **how)

    comparison = traindiff.compare(baseline, other)
    assert comparison.verdict in ("equivalent", "identical"), str(comparison)


def test_a_subnormal_second_moment_that_is_twice_too_large_is_found(tmp_path: Path) -> None:
    def double(step: int, optimizer: Optimizer) -> None:
        if step == 1:
            states = [one for one in optimizer.state.values() if 0.0 < one["exp_avg_sq"].max() < 1e-38]
            assert states
            states[-1]["exp_avg_sq"].mul_(2.0)

    how: dict[str, Any] = {"build": lambda: deep(torch.float32), "num_steps": 4}
    baseline = trained(tmp_path / "base", AdamW, **how)

    doubled = trained(tmp_path / "doubled", AdamW, after_step=double, **how)

    first = traindiff.compare(baseline, doubled).first_divergence
    assert first is not None
    assert (first.phase, first.slot) == ("optimizer", "exp_avg_sq"), str(first)
