"""Recipes that engines can divide among ranks, right and wrong in known places: importable by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from traindiff import Training


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    labels = (batch[:, 0] > 0).long() + 2 * (batch[:, 1] > 0).long()
    return functional.cross_entropy(model(batch), labels)


def training(change: Callable[[nn.Sequential], object] = lambda model: None) -> Training:
    model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    batches = torch.randn(20, 16, 6)
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Training(model=model, optimizer=optimizer, batches=batches, loss=loss)


def recipe() -> Training:
    return training()


def other_epsilon() -> Training:
    def change(model: nn.Sequential) -> None:
        model[2].eps = 1e-3

    return training(change)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


class _DoublesItsGradient(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, _Twice.apply(self.weight), self.bias)


def doubled_gradient() -> Training:
    def change(model: nn.Sequential) -> None:
        model[3].__class__ = _DoublesItsGradient

    return training(change)


def _in_the_second_step_on_rank_1(end: Callable[[], object]) -> Training:
    def change(model: nn.Sequential) -> None:
        calls: list[None] = []

        def hook(*_: Any) -> None:
            calls.append(None)
            if len(calls) == 2 and (not distributed.is_initialized() or distributed.get_rank() == 1):
                end()

        model[2].register_forward_hook(hook)

    return training(change)


def raising() -> Training:
    def end() -> None:
        sys.stdout.write("out of data\n")
        raise ValueError("two steps are one too many")

    return _in_the_second_step_on_rank_1(end)


def killed() -> Training:
    return _in_the_second_step_on_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL))


def hanging() -> Training:
    return _in_the_second_step_on_rank_1(lambda: time.sleep(100))


def breaking_its_graph() -> Training:
    def change(model: nn.Sequential) -> None:
        model[1].register_forward_hook(lambda *_: torch._dynamo.graph_break())

    return training(change)


def without_a_loss() -> tuple[Any, ...]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(2, 2)], lambda batch: None
