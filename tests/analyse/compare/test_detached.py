"""A branch that is detached is named where its gradient is missing, and what passes gradients is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import traindiff
from traindiff.analyse.findings import Finding
from traindiff.storage import open_recording


class Inner(nn.Module):
    def __init__(self, forward: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.__dict__["compute"] = forward

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.__dict__["compute"](self.linear, x)
        return found


class Residual(nn.Module):
    """Blocks beside which the stream goes on, so that a gradient that is lost in one is a term of a sum."""

    def __init__(self, second: Callable[[nn.Linear, Tensor], Tensor], before: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.first = Inner(plain)
        self.second = Inner(second)
        self.head = nn.Linear(8, 3)
        self.__dict__["before"] = before

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.first(x)
        x = x + self.second(self.__dict__["before"](x))
        found: Tensor = self.head(x)
        return found


def plain(linear: nn.Linear, x: Tensor) -> Tensor:
    found: Tensor = functional.gelu(linear(x))
    return found


def detached(linear: nn.Linear, x: Tensor) -> Tensor:
    return plain(linear, x.detach())


def in_place(linear: nn.Linear, x: Tensor) -> Tensor:
    return functional.gelu(linear(x.clone().mul_(1.0))).view(-1, 8).reshape(-1, 8)


def again(linear: nn.Linear, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(plain, linear, x, use_reentrant=False)
    return found


def trained(
    path: Path, second: Callable[..., Tensor] = plain, before: Callable[[Tensor], Tensor] = lambda x: x
) -> Path:
    torch.manual_seed(0)
    model = Residual(second, before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def first_of(baseline: Path, candidate: Path) -> Finding:
    found = traindiff.compare(baseline, candidate).first_divergence
    assert found is not None
    return found


def test_a_branch_that_is_detached_inside_a_module_is_named(tmp_path: Path) -> None:
    first = first_of(trained(tmp_path / "a"), trained(tmp_path / "b", detached))
    assert (first.step, first.phase, first.path) == (0, "backward", "first")
    assert first.message.startswith(
        "second: no gradient flows back through it in the candidate (is something detached inside?). "
    )
    first = first_of(tmp_path / "b", tmp_path / "a")
    assert first.message.startswith("second: no gradient flows back through it in the baseline")


def test_a_branch_that_is_detached_between_modules_is_named(tmp_path: Path) -> None:
    first = first_of(trained(tmp_path / "a"), trained(tmp_path / "b", before=Tensor.detach))
    assert (first.step, first.phase, first.path) == (0, "backward", "first")
    assert first.message.startswith("second: what it is given needs no gradient in the candidate (is it detached, or ")


@pytest.mark.parametrize("second", [in_place, again])
def test_other_ways_to_pass_a_gradient_are_not_called_detached(
    tmp_path: Path, second: Callable[[nn.Linear, Tensor], Tensor]
) -> None:
    found = traindiff.compare(trained(tmp_path / "a"), trained(tmp_path / "b", second))
    assert found.verdict in ("identical", "equivalent")
    assert not [note for note in found.notes if "gradient" in note]
    held = open_recording(str(tmp_path / "b")).rank_content(0)["gradient_paths"]
    assert held["second"] == "through"
    assert held["embed"] == "unneeded"


def test_another_wrong_gradient_is_not_said_to_be_detached(tmp_path: Path) -> None:
    def doubled(linear: nn.Linear, x: Tensor) -> Tensor:
        return plain(linear, x * 2 - x.detach())

    first = first_of(trained(tmp_path / "a"), trained(tmp_path / "b", doubled))
    assert first.phase == "backward"
    assert "detached" not in first.message
