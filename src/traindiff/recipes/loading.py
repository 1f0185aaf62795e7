"""Find a recipe that the command line names."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from traindiff.errors import ConfigError, Problem
from traindiff.recipes.recipe import Recipe, failures_explained


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
    """Inside it, code that reads command lines finds that it was started without arguments."""
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
    """Whether it can be called, and is no class: those that a script imports are not meant."""
    return callable(value) and not isinstance(value, type)


def _can_be_found(source: str) -> bool:
    """Whether the first part of a module's name leads to something that can be imported, also here."""
    _import_first_from(Path.cwd())
    return importlib.util.find_spec(source.partition(".")[0]) is not None


def _imported(source: str) -> ModuleType:
    """Import a module, also from the working directory, as `python -m` does."""
    _import_first_from(Path.cwd())
    return importlib.import_module(source)


def _run(path: Path) -> ModuleType:
    """Run a file as if it had been started: it may import its neighbours."""
    _import_first_from(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _import_first_from(directory: Path) -> None:
    entry = os.fspath(directory)
    if entry in sys.path:
        sys.path.remove(entry)
    sys.path.insert(0, entry)
    _forget_namesakes(directory)


def _forget_namesakes(directory: Path) -> None:
    """Forget modules that another script brought along and that have the name of one in this directory.

    `before/train.py` and `after/train.py` each import their own `model.py`. Without this the second
    would get the first's, and the two would agree whatever was changed.
    """
    here = {entry.stem for entry in directory.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").is_file()}
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
    kept = [directory, *installed, Path(__file__).resolve().parents[1]]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] not in here or name == "__main__" or not file:
            continue
        if not any(Path(file).resolve().is_relative_to(one) for one in kept):
            del sys.modules[name]
