"""Small models, each with something that taps must cope with."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
"""Features of every model's input."""


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 4))


class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, 5, bias=False)
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x) @ self.embedding.weight)


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.ReLU())
        self.last = nn.Linear(16, 4)
        self._use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=self._use_reentrant))


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]
    note: str = "not a tensor"


Pair = namedtuple("Pair", ["first", "second"])


class Returning(nn.Module):
    """Returns its outputs in a container."""

    def __init__(self, container: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4), nn.Linear(4, 3)
        self._container = container

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        return self._container(hidden, self.second(hidden))


CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda hidden, logits: {"hidden": hidden, "logits": logits}, lambda out: out["logits"]),
    "dataclass": (lambda hidden, logits: Output(logits, [hidden]), lambda out: out.logits),
    "namedtuple": (Pair, lambda out: out.second),
    "nested": (lambda hidden, logits: {"a": [(logits, None), hidden], 3: "x"}, lambda out: out["a"][0][0]),
}


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, *, inputs: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
        hidden = self.layer(inputs) * scale
        return hidden if mask is None else hidden * mask


class ReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH))

    def forward(self) -> Tensor:
        return self.table


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = ReturnsParameter()
        self.same = nn.Identity()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.same(x) + self.positions())
