"""A recipe's training, made to run under a setup."""

from __future__ import annotations

from importlib import import_module

from torch.optim import Optimizer

from traindiff.errors import ConfigError, Problem, type_of
from traindiff.setups.request import Request
from traindiff.setups.setup import Setup
from traindiff.setups.training import Training

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
    made: Training = import_module(f"traindiff.setups.{_MODULES[setup.engine]}").build(request)
    return made
