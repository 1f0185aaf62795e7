"""Losses of equal value that are different functions: the gradient that the model's output is given shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import traindiff
from traindiff.analyse.compare.verdict import Comparison

Loss = Callable[[Tensor, Tensor], Tensor]


def trained(path: Path, loss: Loss, *, hidden: nn.Module | None = None) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), hidden or nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            data = torch.Generator().manual_seed(step)
            x, y = torch.randn(8, 6, generator=data), torch.randint(4, (8,), generator=data)
            loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def compared(tmp_path: Path, loss: Loss, *, hidden: nn.Module | None = None) -> Comparison:
    candidate = trained(tmp_path / "candidate", loss, hidden=hidden)
    return traindiff.compare(trained(tmp_path / "baseline", cross_entropy), candidate)


def of_equal_value(logits: Tensor, labels: Tensor) -> Tensor:
    return (
        cross_entropy(logits, labels) + 0.01 * (logits - logits.detach()).square().add(logits - logits.detach()).sum()
    )


class Detached(nn.Module):
    """The same values, with another gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(x)
        return y + 0.1 * (y - y.detach())


def test_a_loss_of_equal_value_and_another_gradient_is_the_first_divergence(tmp_path: Path) -> None:
    found = compared(tmp_path, of_equal_value)

    first, second = found.findings[:2]
    assert (found.verdict, first.step, first.phase, first.path) == ("diverged", 0, "loss", "loss")
    assert first.message.startswith("What the model returns agrees, and the gradient that the loss gives it (at 2 ")
    assert "So the loss is computed otherwise" in first.message
    assert (second.phase, second.path) == ("backward", "2")
    assert first.difference == second.difference


def test_a_gradient_that_a_module_changes_is_not_laid_on_the_loss(tmp_path: Path) -> None:
    found = compared(tmp_path, cross_entropy, hidden=Detached())

    first = found.first_divergence
    assert first is not None
    assert (found.verdict, first.step, first.phase) == ("diverged", 0, "backward")
    assert "the loss is computed otherwise" not in first.message
