"""Sides of a lockstep: the small model of `tests.observe.sharding.training`, on one rank or on several."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from tests.observe.sharding.training import BATCH, LENGTH, VOCABULARY, Model, rank_and_size

Side = tuple[Any, ...]


def batches(num: int = 3, *, shares: bool = True) -> list[Tensor]:
    """This rank's parts of the global batches; all of them where ranks do not share."""
    rank, size = rank_and_size() if shares else (0, 1)
    data = torch.Generator().manual_seed(1)
    whole = (torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data) for _ in range(num))
    return [tokens.chunk(size)[rank].clone() for tokens in whole]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def plain(
    *, lr: float = 1e-2, prepare: Callable[[Model], nn.Module] = lambda model: model, seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, always the same ones."""
    torch.manual_seed(seed)
    model = prepare(Model())
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def altered(side: Side, alter: Callable[[nn.Module, int], None]) -> Side:
    """The side with a step of its own, in which `alter` may change what the backward pass has left."""
    model, optimizer = side
    number = iter(range(1000))

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        alter(model, next(number))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def overwriting(when: Callable[[int], bool]) -> Side:
    """The plain side with a step that leaves zeros in the place of batches, those whose numbers `when` is true of."""
    model, optimizer = plain()
    number = iter(range(1000))

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if when(next(number)):
            tokens.zero_()
        return loss

    return model, optimizer, step


def scaled(factor: float) -> Callable[[nn.Module, int], None]:
    """Multiplies all gradients."""

    def alter(model: nn.Module, _number: int) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= factor

    return alter


def stepped(baseline: Any, candidate: Any, data: Any = None, **settings: Any) -> tuple[traindiff.Comparison, str]:
    """The comparison, and what was printed."""
    file = io.StringIO()
    given = {"loss": loss_of, "file": file, "timeout_seconds": 60.0, **settings}
    comparison = traindiff.Lockstep(baseline, candidate, batches() if data is None else data, **given).go()
    return comparison, file.getvalue()


def lines(printed: str, first: str = "DIVERGED") -> Iterator[str]:
    """The lines that begin with a word."""
    return (line for line in printed.splitlines() if line.startswith(first))
