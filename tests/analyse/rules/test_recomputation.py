"""Checkpointed blocks whose second forward pass is another one than the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import traindiff
from traindiff.analyse.check import Verdict


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.dropout, self.narrow = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(self.dropout(torch.relu(self.wide(x))))
        return y


class Blocks(nn.Module):
    def __init__(self, *, reentrant: bool, keeps_random_state: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 8), nn.ModuleList(Block() for _ in range(2))
        self.how = {"use_reentrant": reentrant, "preserve_rng_state": keeps_random_state}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.how)
        return x


def checked(path: Path, *, reentrant: bool, keeps_random_state: bool) -> Verdict:
    torch.manual_seed(0)
    return checked_model(path, Blocks(reentrant=reentrant, keeps_random_state=keeps_random_state))


def checked_model(path: Path, model: nn.Module) -> Verdict:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        for _ in range(2):
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return traindiff.check(path)


@pytest.mark.parametrize("reentrant", [True, False])
def test_other_dropout_masks_the_second_time_are_found(reentrant: bool, tmp_path: Path) -> None:
    found = checked(tmp_path / "run", reentrant=reentrant, keeps_random_state=False)

    first = found.findings[0]
    assert found.verdict == "unhealthy"
    assert (first.step, first.kind, first.path) == (0, "recomputed", "blocks.1.dropout")
    assert "preserve_rng_state=False?" in first.message


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_same_masks_are_no_finding(reentrant: bool, tmp_path: Path) -> None:
    found = checked(tmp_path / "run", reentrant=reentrant, keeps_random_state=True)

    assert (found.verdict, found.findings) == ("healthy", ())


class CheckpointFunction(torch.autograd.Function):
    """Computes a module again in the backward pass, as the functions of this name in DeepSpeed and Megatron do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, _: Tensor) -> Tensor:  # type: ignore[override]
        ctx.module, ctx.found = module, x.detach()
        with torch.no_grad():
            y: Tensor = module(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x = ctx.found.requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        y.backward(gradient)
        return None, x.grad, None


class BlockCkpt(CheckpointFunction):
    """The same under another name."""


class Rematerialize(CheckpointFunction):
    """The same under another name."""


class Adjoint(CheckpointFunction):
    """Calls its module at the end of its way: the adjoint of an ODE that is solved with one step of Euler."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, _: Tensor) -> Tensor:  # type: ignore[override]
        with torch.no_grad():
            y: Tensor = x + module(x)
        ctx.module, ctx.found = module, y.detach()
        return y


class Product(torch.autograd.Function):
    """Keeps its input for the backward pass, in which torch's checkpointing computes it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2.0 * gradient * x


class Called(nn.Module):
    """Has a block called by a function of autograd, or in a way of its own."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.block, self.call = nn.Linear(4, 8), Block(), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.block, self.first(x))


def test_another_output_inside_a_solver_is_no_finding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Called(lambda block, x: Adjoint.apply(block, x, block.wide.weight))  # type: ignore[no-untyped-call]

    found = checked_model(tmp_path / "run", model)

    assert (found.verdict, found.findings) == ("healthy", ())


@pytest.mark.parametrize(
    "call",
    [
        lambda block, x: CheckpointFunction.apply(block, x, block.wide.weight),
        lambda block, x: BlockCkpt.apply(block, x, block.wide.weight),
        lambda block, x: Rematerialize.apply(block, x, block.wide.weight),
        lambda block, x: checkpoint(
            lambda y: Product.apply(block(y)), x, use_reentrant=False, preserve_rng_state=False
        ),
    ],
)
def test_checkpointing_of_others_and_around_functions_is_judged(call: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)

    found = checked_model(tmp_path / "run", Called(call))

    assert found.verdict == "unhealthy"
    assert (found.findings[0].kind, found.findings[0].path) == ("recomputed", "block.dropout")
