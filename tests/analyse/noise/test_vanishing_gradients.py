"""Gradients that vanish on their way through many layers: rounding parts them, and faults are still found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import traindiff

Hook = Callable[[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, ...]]


class Transposed(nn.Linear):
    """A linear layer that multiplies in the other order."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return (self.weight @ input.t()).t() + self.bias


def run(path: Path, layer: type[nn.Linear], depth: int, gate: type[nn.Module], hook: Hook | None = None) -> Path:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(depth)]
    for one in layers:
        one.__class__ = layer
    model = nn.Sequential(*(part for one in layers for part in (one, gate())))
    if hook is not None:
        model[20].register_full_backward_hook(hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1)
    with traindiff.record(path, model, optimizer):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(16, 8, generator=data)).square().mean().backward()
            optimizer.step()
    return path


@pytest.mark.parametrize(("depth", "gate"), [(40, nn.ReLU), (80, nn.ReLU), (200, nn.Identity), (100, nn.Tanh)])
def test_rounding_explains_how_vanishing_gradients_differ(depth: int, gate: type[nn.Module], tmp_path: Path) -> None:
    baseline = run(tmp_path / "baseline", nn.Linear, depth, gate)

    legal = run(tmp_path / "legal", Transposed, depth, gate)

    comparison = traindiff.compare(baseline, legal)
    assert comparison.verdict == "equivalent", str(comparison)


@pytest.mark.parametrize("factor", [2.0, 1.01, 0.0])
def test_a_factor_in_vanishing_gradients_is_found(factor: float, tmp_path: Path) -> None:
    baseline = run(tmp_path / "baseline", nn.Linear, 40, nn.ReLU)

    def scale(_: nn.Module, gradients: tuple[Tensor, ...], __: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(factor * one for one in gradients)

    comparison = traindiff.compare(baseline, run(tmp_path / "scaled", Transposed, 40, nn.ReLU, scale))

    first = comparison.first_divergence
    assert first is not None, str(comparison)
    assert (first.step, first.phase, first.path) == (0, "backward", "19")
