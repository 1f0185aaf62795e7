"""What an engine is asked for: a training to run, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from traindiff.errors import ConfigError, Problem, type_of
from traindiff.run.config.setup import Setup
from traindiff.run.config.training import Training, split


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A training to run, and how.

    Attributes:
        model: As the recipe made it.
        optimizer: Of its parameters.
        training: What the recipe returned; has `loss`.
        setup: How to run it.
        where: The recipe, for messages.
        asked_by: The call, for messages.
    """

    model: nn.Module
    optimizer: Optimizer
    training: Training
    setup: Setup
    where: str
    asked_by: str

    @property
    def rank(self) -> int:
        """Of this process in the process group; 0 without one."""
        return distributed.get_rank() if distributed.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return distributed.get_world_size() if distributed.is_initialized() else 1

    @property
    def device(self) -> torch.device:
        """Where the recipe has put the model."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The recipe's loss: the mean over the samples of `batch`."""
        assert self.training.loss is not None
        return self.training.loss(model, batch)

    def micro_batches(self, batch: Any, *, part: int = 0, parts: int = 1) -> Sequence[Any]:
        """This rank's part of each micro-batch of a global batch.

        The global batch is first divided into micro-batches and each of them among the ranks, so that every
        micro-batch is one of the global batch, as it is in a run on one process.

        Args:
            batch: One of the training's.
            part: Which part of each micro-batch this rank works on.
            parts: Among how many.
        """
        return self.equal_parts(batch, self.setup.gradient_accumulation_steps * parts)[part::parts]

    def equal_parts(self, batch: Any, parts: int) -> Sequence[Any]:
        """Equal parts of a batch, in order, as the recipe or `split` divides it."""
        return split(batch, parts, where=self.where, asked_by=self.asked_by, by=self.training.split)

    def lacks(self, what: str, *, message: str, fix: str) -> ConfigError:
        """The error of a training that does not give what the setup needs."""
        return ConfigError(self.asked_by, [Problem(where=f"{self.where}, {what}", what=message, fix=fix)])


_MODULES: dict[str, str] = {
    "plain": "plain",
    "ddp": "ddp",
    "fsdp1": "fsdp1",
    "fsdp2": "fsdp2",
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "deepspeed": "deepspeed_engine",
}
"""By engine: the module here whose `build` makes a training of a request. It is imported when it is asked for."""


def built(training: Training, setup: Setup, *, where: str, asked_by: str) -> Training:
    """The training with a step that trains on one global batch as the setup says.

    Where the setup has several ranks, this is called on each, with the same training, in a process group of them.

    Args:
        training: With `loss`. Its model and optimizer become those of the result: they are wrapped, divided, moved.
        setup: How to run it.
        where: The recipe, for messages.
        asked_by: The call, for messages.

    Returns:
        A training with `step`, which takes this rank's part of a batch and returns what to log: its mean loss. `model`
        and `optimizer` are what is to be recorded.

    Raises:
        ConfigError: The training lacks what the setup needs.
    """
    assert training.loss is not None
    optimizer = training.optimizer
    if not isinstance(optimizer, Optimizer):
        problem = Problem(
            where=f"{where}, optimizer",
            what=f"is {type_of(optimizer)}; a training with loss needs the one optimizer that its step calls.",
            fix="Give one torch.optim.Optimizer, with several groups if need be; or give step in place of loss.",
        )
        raise ConfigError(asked_by, [problem])
    request = Request(
        model=training.model, optimizer=optimizer, training=training, setup=setup, where=where, asked_by=asked_by
    )
    made: Training = import_module(f"traindiff.run.config.{_MODULES[setup.engine]}").build(request)
    return made
