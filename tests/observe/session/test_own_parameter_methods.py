"""Models whose `parameters`, `modules` and the like take other arguments than torch's, or return something else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import traindiff
from traindiff.storage import open_recording


class Named(nn.Sequential):
    """As the losses of torchrl."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:  # type: ignore[override]
        yield from super().named_parameters(prefix, recurse)


class Groups(nn.Sequential):
    def parameters(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{"params": list(super().parameters()), "lr": 0.1}]


class GroupsFor(nn.Sequential):
    def parameters(self, lr: float) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{"params": list(super().parameters()), "lr": lr}]


class ModulesOf(nn.Sequential):
    """As a model with parts of several tasks."""

    def modules(self, task: str) -> list[str]:  # type: ignore[override]
        return [task]

    def named_modules(self, task: str) -> dict[str, str]:  # type: ignore[override]
        return {task: "head"}

    def named_children(self, depth: int) -> int:  # type: ignore[override]
        return depth

    def named_buffers(self, device: str) -> str:  # type: ignore[override]
        return device


class Attributes(nn.Sequential):
    """As a tree with children, and an agent with buffers of what it has seen."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        vars(self).update(children=[], buffers=[0.0], modules=("encoder",), parameters={"lr": 0.1})


KINDS = [Named, Groups, GroupsFor, ModulesOf, Attributes]


class Inside(nn.Module):
    """Another model around one."""

    def __init__(self, inner: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


@pytest.mark.parametrize("replica", [None, "ulp:1", "reorder:1", "float64"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_all_parameters_are_observed(
    kind: type[nn.Sequential],
    inside: bool,
    replica: str | None,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    plain: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    model: nn.Module = kind(*plain.children())
    if inside:
        head = nn.Linear(2, 2)
        model, plain = Inside(model, head), Inside(plain, head)
    parameters = dict(plain.named_parameters())
    optimizer = torch.optim.SGD(list(parameters.values()), lr=0.1)
    observe = ("forward", "grad", "optimizer", "update", "param", "witness", "replay")
    with traindiff.record(tmp_path / "run", model, optimizer, observe=observe, replica=replica, strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 4)).square().sum().backward()
            optimizer.step()

    steps = list(open_recording(str(tmp_path / "run")).steps(0))
    seen = [{one.path for one in step.observations if one.phase == "grad"} for step in steps]
    assert seen[:2] == [set(parameters)] * 2
    called = [{one.path for one in step.observations if one.phase == "forward"} for step in steps]
    assert called[:2] == [{name for name, _ in plain.named_modules()}] * 2
    verdict = traindiff.check(tmp_path / "run")
    assert verdict.verdict == "healthy", str(verdict)


@pytest.mark.parametrize("kind", KINDS)
def test_watch_takes_them(kind: type[nn.Sequential]) -> None:
    model = Inside(kind(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), nn.Linear(2, 2))
    found: list[Any] = []
    with traindiff.watch(model, on_detect=found.append):
        model(torch.full((4, 4), torch.inf)).square().sum().backward()

    assert found
