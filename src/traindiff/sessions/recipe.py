"""Recipes: trainings that traindiff can run itself."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.errors import ConfigError, Problem
from traindiff.sessions.targets import Optimizers

_RETURN = (
    "Return traindiff.Training(model=..., optimizer=..., batches=..., step=...): a module, its optimizer, the batches, "
    "and a function that trains on one of them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training, ready to start: what a recipe returns.

    Attributes:
        model: The root module that `step` calls.
        optimizer: Whose calls are the steps; see `traindiff.record`.
        batches: What `step` is called with, one after the other. The same in every run.
        step: Trains on one batch: forward, backward, `optimizer.step()`, `zero_grad()`. What it returns is
            logged: a loss, or numbers by name.
        record: Further settings of `traindiff.record`, e.g. `{"batch_axis": {"lstm": 1}}`.
    """

    model: nn.Module
    optimizer: Optimizers
    batches: Iterable[Any]
    step: Callable[[Any], Any]
    record: Mapping[str, Any] = field(default_factory=dict)


class Recipe(Protocol):
    """A function that prepares a training from scratch. torch, NumPy and `random` are seeded before it is called."""

    def __call__(self) -> Training:
        """The training, ready to start."""


def load_recipe(named: str, *, asked_by: str) -> Recipe:
    """The recipe that `named` names, e.g. `train.py:recipe` or `package.module:recipe`.

    Args:
        named: A Python file or an importable module, a colon, and the name of a function in it.
        asked_by: The command, for messages.

    Raises:
        ConfigError: There is no such file, module or function, or running the file fails.
    """
    source, colon, name = named.rpartition(":")
    if not colon or not source or not name:
        raise _wrong(asked_by, named, "does not name a function in a file.", "Write e.g. train.py:recipe.")
    module = _module(source, named, asked_by)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        problem = Problem.unknown_name(where=named, kind=f"a function of {source}", found=name, known=functions)
        raise ConfigError(asked_by, [problem])
    return found  # type: ignore[no-any-return]


def prepared(recipe: Recipe, *, seed: int, asked_by: str) -> Training:
    """A fresh training, seeded.

    Raises:
        ConfigError: The recipe failed, or returned something else.
    """
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    name = getattr(recipe, "__qualname__", type(recipe).__qualname__)
    training: Any
    try:
        training = recipe()
    except Exception as error:
        says = f"calling it raised {type(error).__name__}: {error}"
        raise _wrong(asked_by, f"recipe {name}", says, "Make it work without traindiff first.") from error
    if isinstance(training, (tuple, list)) and len(training) == 4:
        model, optimizer, batches, step = training
        training = Training(model=model, optimizer=optimizer, batches=batches, step=step)
    if not isinstance(training, Training):
        count = f" of {len(training)}" if isinstance(training, (tuple, list)) else ""
        raise _wrong(asked_by, f"recipe {name}", f"returned a {type(training).__name__}{count}.", _RETURN)
    problems = [
        Problem(where=f"recipe {name}, {what}", what=f"is a {type(value).__name__}, not {kind}.", fix=_RETURN)
        for what, value, fits, kind in (
            ("model", training.model, isinstance(training.model, nn.Module), "a torch.nn.Module"),
            ("optimizer", training.optimizer, _has_optimizers(training.optimizer), "a torch.optim.Optimizer"),
            ("batches", training.batches, isinstance(training.batches, Iterable), "something to iterate over"),
            ("step", training.step, callable(training.step), "a function"),
        )
        if not fits
    ]
    if problems:
        raise ConfigError(asked_by, problems)
    return training


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


def logged(returned: Any) -> Iterator[tuple[str, float | Tensor]]:
    """What `step` returned, as names and numbers: a loss, or a mapping."""
    found = returned if isinstance(returned, Mapping) else {"loss": returned}
    for name, value in found.items():
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            yield str(name), value


def _has_optimizers(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    several = value if isinstance(value, (list, tuple)) else [value]
    return value is None or (bool(several) and all(isinstance(one, Optimizer) for one in several))


def _module(source: str, named: str, asked_by: str) -> Any:
    path = Path(source)
    if source.endswith(".py") and not path.is_file():
        raise _wrong(asked_by, named, f"{source} does not exist.", "Give the path of a Python file.")
    try:
        return _run(path) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:
        says = f"running {source} raised {type(error).__name__}: {error}"
        raise _wrong(asked_by, named, says, "Make it work without traindiff first.") from error


def _run(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look their module up
    directory = os.fspath(path.resolve().parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)  # it may import its neighbours, as when it is run
    spec.loader.exec_module(module)
    return module


def _wrong(asked_by: str, where: str, what: str, fix: str) -> ConfigError:
    return ConfigError(asked_by, [Problem(where=where, what=what, fix=fix)])
