"""Runs of one training that record other things: nothing tells them apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import traindiff
from traindiff.core.tap_registry import OBSERVED_BY_DEFAULT

STEPS = 3

Train = Callable[[nn.Module, Path, list[str] | None], None]


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def sharpness_aware(model: nn.Module, path: Path, observe: list[str] | None) -> None:
    """Evaluates the loss again where its gradient leads, and moves back."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer, observe=observe):
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            moves = [0.05 * one.grad for one in model.parameters() if one.grad is not None]
            with torch.no_grad():
                for one, move in zip(model.parameters(), moves, strict=True):
                    one.add_(move)
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            with torch.no_grad():
                for one, move in zip(model.parameters(), moves, strict=True):
                    one.sub_(move)
            optimizer.step()
            optimizer.zero_grad()


def searching(model: nn.Module, path: Path, observe: list[str] | None) -> None:
    """Evaluates the loss several times in each step."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    with traindiff.record(path, model, optimizer, observe=observe):
        for step in range(STEPS):

            def closure(step: int = step) -> float:
                optimizer.zero_grad()
                loss = model(batch(step)).square().mean()
                loss.backward()
                return loss.item()

            optimizer.step(closure)


def clipping_weights(model: nn.Module, path: Path, observe: list[str] | None) -> None:
    """Changes parameters and the optimizer's state between the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer, observe=observe):
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for one in model.parameters():
                    one.clamp_(-0.2, 0.2)
                    optimizer.state[one]["exp_avg"].clamp_(-1e-4, 1e-4)


@pytest.mark.parametrize("observe", [["update"], ["grad"], ["optimizer"], ["loss"], ["witness"], ["all", "witness"]])
@pytest.mark.parametrize("train", [sharpness_aware, searching, clipping_weights])
def test_what_one_run_alone_records_tells_no_runs_apart(train: Train, observe: list[str], tmp_path: Path) -> None:
    everything = [*OBSERVED_BY_DEFAULT] if observe[0] == "all" else []
    for name, chosen in (("whole", None), ("part", [*everything, *observe[-1:]])):
        torch.manual_seed(0)
        train(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), tmp_path / name, chosen)
    for names in (("whole", "part"), ("part", "whole")):
        comparison = traindiff.compare(*(tmp_path / name for name in names))
        assert comparison.findings == ()
        assert comparison.verdict in ("incomplete", "identical")
