"""Compiled models are watched without a graph break; what is found is raised when the compiled code has returned."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import traindiff
from tests.observe.compile.compiling import function, method, per_layer, torch_may_warn, whole
from tests.observe.nonfinite.trainings import WIDTH

pytestmark = torch_may_warn


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), nn.Tanh()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) * self.factor


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


WAYS: dict[str, Any] = {"whole": whole, "method": method, "a function": function, "per layer": per_layer}


def train(way: str, *, watched: bool, breaks: Any = lambda model: None) -> tuple[list[Tensor], int]:
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    with traindiff.watch(model, optimizer, output=None, file=io.StringIO()) if watched else nullcontext():
        call = WAYS[way](model, "aot_eager")
        for step in range(4):
            if step == 2:
                breaks(model)
            loss = call(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses, sum(counters["graph_break"].values())


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_training_is_the_same_to_the_bit_and_has_no_graph_break(way: str) -> None:
    expected, _ = train(way, watched=False)
    actual, breaks = train(way, watched=True)

    assert breaks == 0
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_an_overflow_in_compiled_code_is_named(way: str) -> None:
    def breaks(model: Any) -> None:
        model.layers[1].factor.fill_(math.inf)

    with pytest.raises(traindiff.NonFiniteError, match=r"during batch_number=2\. layers\.1 output.* holds infinity"):
        train(way, watched=True, breaks=breaks)
