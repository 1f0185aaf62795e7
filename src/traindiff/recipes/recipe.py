"""Recipes: trainings that traindiff can run itself."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.errors import ConfigError, Problem, type_of
from traindiff.setups.building import built
from traindiff.setups.setup import PLAIN, Setup
from traindiff.setups.training import Four, Training

_RETURN = (
    "Return traindiff.Training(model=..., optimizer=..., batches=..., step=...), or a tuple of these four: a module, "
    "its optimizer, the batches, and a function that trains on one of them."
)
_LOSS = (
    "Give traindiff.Training(loss=...), a function of model and batch that returns the mean loss over the samples; "
    "traindiff then makes the step."
)


class Recipe(Protocol):
    """A function that prepares a training from scratch. torch, NumPy and `random` are seeded before it is called."""

    def __call__(self) -> Training | Four:
        """The training, ready to start."""


def prepared(recipe: Recipe, *, seed: int, asked_by: str, setup: Setup = PLAIN) -> Training:
    """A fresh training, seeded, with a step.

    Args:
        recipe: Prepares it.
        seed: Of torch's, NumPy's and Python's generators.
        asked_by: The call, for messages.
        setup: Under which engine, in which dtype, ... it is to run, in this process and, if there are several ranks,
            in the process group that is there. Anything but the default needs a training with `loss`.

    Returns:
        The training that `recipe` returned; where it gave `loss`, with the `step`, model and optimizer of the setup.

    Raises:
        ConfigError: The recipe failed, returned something else, or cannot be run under the setup.
    """
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    where = f"recipe {name_of(recipe)}"
    training: Any
    with failures_explained("calling it", where=where, asked_by=asked_by):
        training = recipe()
    if isinstance(training, (tuple, list)) and len(training) == 4:
        model, optimizer, batches, step = training
        training = Training(model=model, optimizer=optimizer, batches=batches, step=step)
    if not isinstance(training, Training):
        count = f" of {len(training)}" if isinstance(training, (tuple, list)) else ""
        says = f"returned {type_of(training)}{count}."
        raise ConfigError(asked_by, [Problem(where=where, what=says, fix=_RETURN)])
    problems = [
        Problem(where=f"{where}, {what}", what=f"is {type_of(value)}, not {kind}.", fix=_RETURN)
        for what, value, fits, kind in (
            ("model", training.model, isinstance(training.model, nn.Module), "a torch.nn.Module"),
            ("optimizer", training.optimizer, _has_optimizers(training.optimizer), "a torch.optim.Optimizer"),
            ("batches", training.batches, isinstance(training.batches, Iterable), "something to iterate over"),
            ("step", training.step, callable(training.step) or training.loss is not None, "a function"),
            ("loss", training.loss, callable(training.loss) or training.loss is None, "a function"),
        )
        if not fits
    ]
    if training.loss is not None and training.step is not None:
        says = "are both given; only one of them can be what is trained with."
        problems.append(Problem(where=f"{where}, loss and step", what=says, fix="Give loss alone, or step alone."))
    if problems:
        raise ConfigError(asked_by, problems)
    refuse_without_loss(training, setup, where=where, asked_by=asked_by)
    return training if training.loss is None else built(training, setup, where=where, asked_by=asked_by)


def refuse_without_loss(training: Training, setup: Setup, *, where: str, asked_by: str) -> None:
    """Raise `ConfigError` where the training's step is to be made for a setup, and there is no loss to make it from."""
    if training.loss is None and setup != PLAIN:
        says = f"is not given, without which the training cannot be run as: {setup.says}."
        raise ConfigError(asked_by, [Problem(where=f"{where}, loss", what=says, fix=_LOSS)])


@contextmanager
def failures_explained(doing: str, *, where: str, asked_by: str) -> Iterator[None]:
    """Whatever fails in the user's code inside is an error of what the user named.

    Raises:
        ConfigError: In place of any exception, `SystemExit` included. One that is a `ConfigError` already stays.
    """
    try:
        yield
    except ConfigError:
        raise  # of what traindiff does in the user's name: a step that it made
    except (Exception, SystemExit) as error:
        says = f"{doing} raised {type(error).__name__}: {error}"
        problem = Problem(
            where=where, what=says, fix="This is raised by the training itself: make it run without traindiff first."
        )
        raise ConfigError(asked_by, [problem]) from error


@contextmanager
def undisturbed_random_state() -> Iterator[None]:
    """Give the caller's generators back as they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def name_of(recipe: Recipe) -> str:
    """What the recipe is called in messages."""
    return str(getattr(recipe, "__qualname__", type(recipe).__qualname__))


def logged(returned: Any) -> Iterator[tuple[str, float | Tensor]]:
    """What `step` returned, as names and numbers: a loss, or a mapping."""
    found = returned if isinstance(returned, Mapping) else {"loss": returned}
    for name, value in found.items():
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            yield str(name), value


def _has_optimizers(value: Any) -> bool:
    if value is None:
        return True  # found when they first step
    several: Sequence[Any]
    if isinstance(value, Mapping):
        several = list(value.values())
    else:
        several = value if isinstance(value, (list, tuple)) else [value]
    return bool(several) and all(isinstance(one, Optimizer) for one in several)
