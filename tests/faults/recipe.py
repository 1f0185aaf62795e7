"""A small training that a test can vary in one place, recorded or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import traindiff
from tests.faults.models import CLASSES, VOCABULARY, ConvNet, Gpt, LstmClassifier, Mlp

Precision = Literal["float32", "autocast", "bfloat16"]
BATCH = 8


@dataclass(slots=True, kw_only=True)
class Moment:
    """What a change of the training may reach into."""

    step: int
    model: nn.Module
    optimizer: Optimizer
    inputs: Tensor
    labels: Tensor


Change = Callable[[Moment], None]


def _nothing(_: Moment) -> None:
    pass


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A training. Each field is one thing that a variation or a fault may change.

    `micro_batches` are numbers of samples; losses are weighted by their share of the batch.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    optimizer: Callable[[nn.Module], Optimizer]
    precision: Precision = "float32"
    steps: int = 8
    loss: Callable[[Tensor, Tensor], Tensor] = mean_cross_entropy
    micro_batches: Sequence[int] = (BATCH,)
    weigh: Callable[[int, Sequence[int]], float] = lambda number, sizes: sizes[number] / sum(sizes)
    clip: float | None = None
    schedule: Callable[[int], float] | None = None
    prepare: Callable[[nn.Module], None] = lambda model: None
    before_step: Change = _nothing
    after_backward: Change = _nothing
    after_step: Change = _nothing
    zero_grad: Callable[[Moment], None] = lambda now: now.optimizer.zero_grad()
    double: bool = False
    seed: int = 0

    def but(self, **changes: Any) -> Recipe:
        return replace(self, **changes)

    def __call__(self) -> traindiff.Training:
        """The training, as `traindiff.verify` wants it."""
        torch.manual_seed(self.seed)
        model = self.build()
        if self.precision == "bfloat16":
            model.to(torch.bfloat16)
        if self.double:
            model.double()
        self.prepare(model)
        optimizer = self.optimizer(model)
        return traindiff.Training(
            model=model, optimizer=optimizer, batches=self._moments(model, optimizer), step=self._step
        )

    def run(self, path: Path, **settings: Any) -> Path:
        """Train, and record into `path`."""
        training = self()
        with traindiff.record(path, training.model, training.optimizer, **settings):
            for now in training.batches:
                training.step(now)
        return path

    def _moments(self, model: nn.Module, optimizer: Optimizer) -> Iterator[Moment]:
        data = torch.Generator().manual_seed(7)
        for step in range(self.steps):
            inputs, labels = self.batch(data)
            if inputs.is_floating_point():
                inputs = inputs.to(next(model.parameters()).dtype)
            yield Moment(step=step, model=model, optimizer=optimizer, inputs=inputs, labels=labels)

    def _step(self, now: Moment) -> None:
        if self.schedule:
            for group in now.optimizer.param_groups:
                group["lr"] = self.schedule(now.step)
        self.before_step(now)
        sizes = self.micro_batches
        parts = zip(now.inputs.split(list(sizes)), now.labels.split(list(sizes)), strict=True)
        for number, (inputs, labels) in enumerate(parts):
            with self._autocast():
                logits = now.model(inputs)
            (self.loss(logits, labels) * self.weigh(number, sizes)).backward()
        self.after_backward(now)
        if self.clip:
            nn.utils.clip_grad_norm_(now.model.parameters(), self.clip)
        now.optimizer.step()
        self.after_step(now)
        self.zero_grad(now)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.precision == "autocast" else nullcontext()


def _vectors(data: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 20, generator=data), torch.randint(CLASSES, (BATCH,), generator=data)


def _images(data: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 3, 8, 8, generator=data), torch.randint(CLASSES, (BATCH,), generator=data)


def _text(data: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, 17), generator=data)
    return tokens[:, :-1], tokens[:, 1:]


def _sentences(data: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (BATCH, 12), generator=data), torch.randint(CLASSES, (BATCH,), generator=data)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], tuple[Tensor, Tensor]]]] = {
    "mlp": (Mlp, _vectors),
    "gpt": (Gpt, _text),
    "conv": (ConvNet, _images),
    "lstm": (LstmClassifier, _sentences),
}

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=3e-3),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1),
}


@cache
def runs_here(model: str, precision: str) -> bool:
    """Whether torch can run a training on this processor: oneDNN has no LSTM in bfloat16 for those without AVX-512.

    Torch does not take its own there, but raises.
    """
    if (model, precision) != ("lstm", "autocast"):
        return True
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()), torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(16, 24)(torch.ones(3, 2, 16))
    except RuntimeError:
        return False
    return True


def recipe(model: str, optimizer: str = "adamw", precision: Precision = "float32") -> Recipe:
    """The training from which tests depart."""
    build, batch = MODELS[model]
    return Recipe(build=build, batch=batch, optimizer=OPTIMIZERS[optimizer], precision=precision)
