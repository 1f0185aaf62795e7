"""LBFGS comes close to a minimum, where gradients cancel: rounding is no divergence there, and a fault is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import traindiff

AT = 3
FAULTS = {"weight": "2.weight", "output": "2"}


def train(path: Path, *, micro_batches: int = 1, fault: str = "", seed: int = 2) -> Path:
    torch.manual_seed(seed)
    layers = nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 2)
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1, max_iter=8, history_size=6, line_search_fn="strong_wolfe")
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.stack([inputs[:, 0] * inputs[:, 1], inputs[:, 2].sin()], 1)
    steps = 0

    def wrong(gradient: Tensor) -> Tensor:
        return gradient * 1.001 if steps >= AT else gradient

    def closure() -> Tensor:
        optimizer.zero_grad()
        whole = torch.zeros((), dtype=torch.float64)
        for own, target in zip(inputs.chunk(micro_batches), wanted.chunk(micro_batches), strict=True):
            loss = nn.functional.mse_loss(model(own), target) / micro_batches
            loss.backward()
            whole += loss.detach()
        return whole

    with traindiff.record(path, model, optimizer):
        if fault == "weight":
            model.get_parameter("2.weight").register_hook(wrong)
        if fault == "output":
            model[2].register_full_backward_hook(lambda _, given, __: (wrong(given[0]),))
        for _ in range(6):
            optimizer.step(closure)
            steps += 1
    return path


@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("seed", [2, 5])
def test_the_order_of_sums_is_no_divergence(tmp_path: Path, micro_batches: int, seed: int) -> None:
    whole = train(tmp_path / "whole", seed=seed)
    cut = train(tmp_path / "cut", micro_batches=micro_batches, seed=seed)

    assert traindiff.compare(whole, cut).verdict == "equivalent"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_gradient_that_is_wrong_by_a_thousandth_is_found(tmp_path: Path, fault: str) -> None:
    comparison = traindiff.compare(train(tmp_path / "right"), train(tmp_path / "wrong", fault=fault))

    first = comparison.findings[0]
    assert comparison.verdict == "diverged"
    assert first.step == AT
    assert first.path in (FAULTS[fault], "1")
