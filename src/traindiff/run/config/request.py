"""The request to an engine: a training to run, and how to run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from traindiff.core.torch_compat.training import parameters_in
from traindiff.errors import ConfigError, Problem, type_of
from traindiff.run.config.setup import Setup
from traindiff.run.config.training import Training, split


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A training to run, and how to run it; `where` and `asked_by` are for messages."""

    model: nn.Module
    optimizer: Optimizer
    training: Training
    setup: Setup
    where: str
    asked_by: str

    @property
    def rank(self) -> int:
        """This process's rank; 0 without a process group."""
        return distributed.get_rank() if distributed.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """Number of ranks; 1 without a process group."""
        return distributed.get_world_size() if distributed.is_initialized() else 1

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return next((parameter.device for parameter in parameters_in(self.model)), torch.device("cpu"))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The recipe's loss: the mean over the samples of `batch`."""
        assert self.training.loss is not None
        return self.training.loss(model, batch)

    def micro_batches(self, batch: Any, *, part: int = 0, parts: int = 1) -> Sequence[Any]:
        """This rank's part of each micro-batch of a global batch.

        The global batch is divided into micro-batches first, and each micro-batch among the ranks. So every micro-batch
        holds the same samples as in a run on one process.
        """
        return self.equal_parts(batch, self.setup.gradient_accumulation_steps * parts)[part::parts]

    def equal_parts(self, batch: Any, parts: int) -> Sequence[Any]:
        """Equal parts of a batch, in order, made by the recipe's own `split` or by `split` of traindiff."""
        return split(batch, parts, where=self.where, asked_by=self.asked_by, by=self.training.split)

    def lacks(self, what: str, *, message: str, fix: str) -> ConfigError:
        """The error for a training that does not give what the setup needs."""
        return ConfigError(self.asked_by, [Problem(where=f"{self.where}, {what}", what=message, fix=fix)])


_BUILDERS = {
    "plain": ("stepping", "plain"),
    "ddp": ("stepping", "ddp"),
    "fsdp1": ("sharded", "fsdp1"),
    "fsdp2": ("sharded", "fsdp2"),
    "tp": ("sharded", "tensor_parallel"),
    "pp": ("pipeline_parallel", "build"),
    "deepspeed": ("deepspeed_engine", "build"),
}
"""By engine: the module and the function that make a training of a request. The module is imported when needed."""


def built(training: Training, setup: Setup, *, where: str, asked_by: str) -> Training:
    """A training whose step trains on one global batch under the setup.

    With several ranks, call this on each rank, with the same training, inside their process group.

    Args:
        training: Training with a `loss`. Its model and optimizer are wrapped, divided or moved; the result uses them.
        setup: How to run it.
        where: The recipe, for messages.
        asked_by: The call, for messages.

    Returns:
        A training whose `step` takes a global batch, trains on this rank's part of it and returns this rank's mean
        loss. Its `model` and `optimizer` are the ones to record.

    Raises:
        ConfigError: The training lacks something that the setup needs.
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
    module, name = _BUILDERS[setup.engine]
    made: Training = getattr(import_module(f"traindiff.run.config.{module}"), name)(request)
    return made
