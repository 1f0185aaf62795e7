"""A training of the zoo as a recipe, each of whose fields a variation or a fault may change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import traindiff

Precision = Literal["float32", "autocast", "bfloat16"]
Batch = Mapping[str, Tensor]
Optimizers = Optimizer | dict[str, Optimizer]
Loss = Callable[[nn.Module, Batch], Tensor]
"""The mean loss over the samples of a batch."""


@dataclass(slots=True, kw_only=True)
class Now:
    """A step of a training, as changes see it.

    Attributes:
        recipe: The training.
        step: Number of the step, from 0.
        model: The model.
        optimizer: Its optimizer, or its optimizers by name.
        batch: The batch of the step. A change may replace it before the step.
    """

    recipe: Recipe
    step: int
    model: nn.Module
    optimizer: Optimizers
    batch: Batch

    @property
    def optimizers(self) -> list[Optimizer]:
        """All optimizers, in order."""
        return list(self.optimizer.values()) if isinstance(self.optimizer, dict) else [self.optimizer]

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the loss is computed."""
        return torch.autocast("cpu", torch.bfloat16) if self.recipe.precision == "autocast" else nullcontext()

    def loss(self, batch: Batch) -> Tensor:
        """The loss of a batch."""
        with self.autocast():
            return self.recipe.loss(self.model, batch)

    def parts(self) -> Iterator[tuple[Batch, float]]:
        """The micro-batches, each with its share of the loss."""
        shares = self.recipe.micro_batches
        if shares == (1.0,):
            yield self.batch, 1.0
            return
        samples = len(next(iter(self.batch.values())))
        sizes = [round(share * samples) for share in shares]
        cut = {name: tensor.split(sizes) for name, tensor in self.batch.items()}
        for number, size in enumerate(sizes):
            part = {name: pieces[number] for name, pieces in cut.items()}
            yield part, self.recipe.weigh(self.recipe, self.batch, part, size / samples)

    def backward(self) -> None:
        """The gradients of the batch's loss, in micro-batches."""
        for number, (part, share) in enumerate(self.parts()):
            if (self.step, number) not in self.recipe.lost:
                (self.loss(part) * share).backward()

    def clip(self) -> None:
        """Clip the gradients, if the training does."""
        if self.recipe.clip < inf:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip, foreach=self.recipe.clip_foreach)


Change = Callable[[Now], None]


def nothing(_: Any) -> None:
    """Changes nothing."""


def plain_step(now: Now) -> None:
    """One optimizer and one loss: backward, clip, step, zero_grad."""
    now.backward()
    now.recipe.after_backward(now)
    now.clip()
    now.optimizers[0].step()
    now.recipe.after_step(now)
    now.recipe.zero_grad(now)


def by_samples(recipe: Recipe, batch: Batch, part: Batch, share: float) -> float:
    """The share of a micro-batch in a mean over samples."""
    return share


def zero_grad(now: Now) -> None:
    """Forget all gradients."""
    for optimizer in now.optimizers:
        optimizer.zero_grad()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A training.

    Attributes:
        name: Its name.
        build: Makes the model; torch's seed is set before.
        sample: Draws a batch.
        loss: The mean loss over the samples of a batch.
        optimizer: Makes the optimizer.
        step: One step.
        precision: Precision of parameters and computation.
        steps: Number of steps.
        cuttable: Whether samples are independent, so that micro-batches and another order are legal.
        weigh: The share of a micro-batch in the loss.
        block: Class of modules that may be computed anew in the backward pass.
        micro_batches: Shares of the batch.
        clip: Largest norm of the gradients.
        clip_foreach: Which implementation clips.
        schedule: Learning rate by step, as a factor.
        prepare: Changes the model before the training.
        begin: Changes what each step begins with.
        after_backward: Changes gradients before they are clipped.
        after_step: Changes what the optimizer has left.
        zero_grad: Forgets gradients.
        around: A context for each step.
        lost: Step and number of micro-batches that are left out.
        record: Further settings of the recording.
        double: Whether to compute in float64.
        seed: Seed of the parameters.
    """

    name: str
    build: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], Batch]
    loss: Loss
    optimizer: Callable[[nn.Module], Optimizers]
    step: Change = plain_step
    precision: Precision = "float32"
    steps: int = 5
    cuttable: bool = True
    weigh: Callable[[Recipe, Batch, Batch, float], float] = by_samples
    block: type[nn.Module] | None = None
    micro_batches: Sequence[float] = (1.0,)
    clip: float = inf
    clip_foreach: bool | None = None
    schedule: Callable[[int], float] | None = None
    prepare: Callable[[nn.Module], None] = nothing
    begin: Change = nothing
    after_backward: Change = nothing
    after_step: Change = nothing
    zero_grad: Change = zero_grad
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    lost: frozenset[tuple[int, int]] = frozenset()
    record: Mapping[str, Any] = field(default_factory=dict, hash=False)
    double: bool = False
    seed: int = 0

    def but(self, **changes: Any) -> Recipe:
        """This training, changed."""
        return replace(self, **changes)

    def dtype(self) -> torch.dtype:
        """Type of parameters and of floating-point inputs."""
        if self.double:
            return torch.float64
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32

    def __call__(self) -> traindiff.Training:
        """The training, as `traindiff.verify` wants it."""
        torch.manual_seed(self.seed)
        model = self.build().to(self.dtype())
        self.prepare(model)
        optimizer = self.optimizer(model)
        return traindiff.Training(
            model=model, optimizer=optimizer, batches=self._batches(model, optimizer), step=self._train,
            record=self.record,
        )  # fmt: skip

    def _batches(self, model: nn.Module, optimizer: Optimizers) -> Iterator[Now]:
        data = torch.Generator().manual_seed(7)
        for step in range(self.steps):
            drawn = self.sample(data)
            batch = {name: one.to(self.dtype()) if one.is_floating_point() else one for name, one in drawn.items()}
            yield Now(recipe=self, step=step, model=model, optimizer=optimizer, batch=batch)

    def _train(self, now: Now) -> None:
        if self.schedule:
            for optimizer in now.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group.setdefault("initial_lr", group["lr"]) * self.schedule(now.step)
        with ExitStack() as stack:
            stack.enter_context(self.around())
            self.begin(now)
            self.step(now)
