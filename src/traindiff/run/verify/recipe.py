"""Recipes: functions that prepare a training which traindiff can run itself."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

import traindiff
from traindiff.errors import ConfigError, Problem, type_of
from traindiff.run.config.request import built
from traindiff.run.config.setup import PLAIN, Setup
from traindiff.run.config.training import Four, Training

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


Named = Recipe | str
"""A recipe, or its name: `FILE.py:FUNCTION`, `MODULE:FUNCTION`."""


def prepared(recipe: Recipe, *, seed: int, asked_by: str, setup: Setup = PLAIN) -> Training:
    """A fresh training, seeded, with a step.

    Args:
        recipe: Prepares it.
        seed: Seed of torch's, NumPy's and Python's generators.
        asked_by: The call, for messages.
        setup: Engine, dtype, ... of the run, in this process and in its process group if there are several ranks. Every
            setup except the default needs a training with `loss`.

    Returns:
        The recipe's training. If it gave `loss`, with the `step`, model and optimizer of the setup.

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
        message = f"returned {type_of(training)}{count}."
        raise ConfigError(asked_by, [Problem(where=where, what=message, fix=_RETURN)])
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
        message = "are both given; only one of them can be what is trained with."
        problems.append(Problem(where=f"{where}, loss and step", what=message, fix="Give loss alone, or step alone."))
    if problems:
        raise ConfigError(asked_by, problems)
    refuse_without_loss(training, setup, where=where, asked_by=asked_by)
    return training if training.loss is None else built(training, setup, where=where, asked_by=asked_by)


def refuse_without_loss(training: Training, setup: Setup, *, where: str, asked_by: str) -> None:
    """Raise `ConfigError` if the setup needs a step made from `loss`, and the training has no loss."""
    if training.loss is None and setup != PLAIN:
        message = f"is not given, without which the training cannot be run as: {setup.message}."
        raise ConfigError(asked_by, [Problem(where=f"{where}, loss", what=message, fix=_LOSS)])


@contextmanager
def failures_explained(doing: str, *, where: str, asked_by: str) -> Iterator[None]:
    """Turn any failure of the user's code inside into an error that names `where`.

    Raises:
        ConfigError: In place of any exception, `SystemExit` included. A `ConfigError` is raised unchanged.
    """
    try:
        yield
    except ConfigError:
        raise  # from a step that traindiff made
    except (Exception, SystemExit) as error:
        message = f"{doing} raised {type(error).__name__}: {error}"
        problem = Problem(
            where=where, what=message, fix="This is raised by the training itself: make it run without traindiff first."
        )
        raise ConfigError(asked_by, [problem]) from error


@contextmanager
def undisturbed_random_state() -> Iterator[None]:
    """Restore the caller's random generators afterwards."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def name_of(recipe: Recipe) -> str:
    """The recipe's name in messages."""
    return str(getattr(recipe, "__qualname__", type(recipe).__qualname__))


def recipe_name(recipe: Named) -> str:
    """The recipe's name in messages, as the user gave it."""
    return recipe if isinstance(recipe, str) else name_of(recipe)


def _has_optimizers(value: Any) -> bool:
    if value is None:
        return True  # optimizers are found when they first step
    several: Sequence[Any]
    if isinstance(value, Mapping):
        several = list(value.values())
    else:
        several = value if isinstance(value, (list, tuple)) else [value]
    return bool(several) and all(isinstance(one, Optimizer) for one in several)


def load_recipe(named: str, *, asked_by: str) -> Recipe:
    """The recipe of this name, e.g. `train.py:recipe` or `package.module:recipe`.

    Args:
        named: A Python file or an importable module, a colon, and the name of a function in it.
        asked_by: The command, for messages.

    Raises:
        ConfigError: The file, module or function does not exist, or running the file fails.
    """
    source, colon, name = named.rpartition(":")
    if not colon or not source or not name:
        problem = Problem(
            where=named,
            what="does not name a function in a file or module.",
            fix="Write FILE.py:FUNCTION or MODULE:FUNCTION, e.g. train.py:recipe.",
        )
        raise ConfigError(asked_by, [problem])
    _refuse_no_source(source, named, asked_by)
    with failures_explained(f"running {source}", where=named, asked_by=asked_by), _started_as(source):
        module = _run(Path(source).resolve()) if source.endswith(".py") else _imported(source)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [one for one, value in vars(module).items() if _may_be_a_recipe(value) and not one.startswith("_")]
        problem = Problem.unknown_name(where=named, kind=f"a function of {source}", found=name, known=functions)
        raise ConfigError(asked_by, [problem])

    @wraps(found)
    def recipe() -> Any:
        with _started_as(source):
            return found()

    return recipe


@contextmanager
def _started_as(source: str) -> Iterator[None]:
    """Show the code inside a command line without arguments."""
    before = sys.argv
    sys.argv = [source]
    try:
        yield
    finally:
        sys.argv = before


def _refuse_no_source(source: str, named: str, asked_by: str) -> None:
    path = Path(source)
    what, fix = "", "Give the path of a Python file, e.g. train.py:recipe."
    if source.endswith(".py") and not path.is_file():
        what = f"{source} does not exist."
    elif not source.endswith(".py") and path.exists():
        what = f"{source} is not a Python file."
    elif not source.endswith(".py") and not _can_be_found(source):
        what = f"there is no module {source} to import."
        fix = "Give a module that Python finds from here, or the path of a file, e.g. train.py:recipe."
    if what:
        problem = Problem(where=named, what=what, fix=fix)
        raise ConfigError(asked_by, [problem])


def _may_be_a_recipe(value: object) -> bool:
    """True for callables that are no classes: the classes that a script imports are not meant."""
    return callable(value) and not isinstance(value, type)


def _can_be_found(source: str) -> bool:
    """True if the first part of a module's name can be imported, also from the working directory."""
    _import_first_from(Path.cwd())
    return importlib.util.find_spec(source.partition(".")[0]) is not None


def source_file(named: Named) -> Path | None:
    """The file in which a recipe's name says that it is; None if there is no such file. Nothing is imported."""
    source = recipe_name(named).rpartition(":")[0]
    if source.endswith(".py"):
        return file if (file := Path(source)).is_file() else None
    places: Sequence[str] | None = [os.fspath(Path.cwd()), *sys.path]
    found = None
    parts = source.split(".")
    for number in range(len(parts)):
        found = None if places is None else PathFinder.find_spec(".".join(parts[: number + 1]), places)
        if found is None:
            return None
        places = found.submodule_search_locations
    return Path(found.origin) if found is not None and found.origin else None


def _imported(source: str) -> ModuleType:
    """Import a module, also from the working directory, as `python -m` does."""
    _import_first_from(Path.cwd())
    return importlib.import_module(source)


def _run(path: Path) -> ModuleType:
    """Run a file as if it had been started: it may import its neighbors."""
    _import_first_from(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def _import_first_from(directory: Path) -> None:
    entry = os.fspath(directory)
    if entry in sys.path:
        sys.path.remove(entry)
    sys.path.insert(0, entry)
    _forget_namesakes(directory)


def _forget_namesakes(directory: Path) -> None:
    """Forget modules of another script that have the name of a module in this directory.

    `before/train.py` and `after/train.py` each import their own `model.py`. Without this the second script would get
    the first one's, and the two would agree whatever was changed.
    """
    here = {entry.stem for entry in directory.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").is_file()}
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
    kept = [directory, *installed, Path(traindiff.__file__).resolve().parent]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] not in here or name == "__main__" or not file:
            continue
        if not any(Path(file).resolve().is_relative_to(one) for one in kept):
            del sys.modules[name]
