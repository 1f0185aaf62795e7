"""What the self-test trains: a model of its own, or the user's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from traindiff.errors import ConfigError, Problem

_RETURN = "Return (model, optimizer, step): a module, its optimizer, and a function that trains it for one step."

_SKIPPED_STEPS = 16
"""Steps that a loss scaler may skip at the beginning: it begins at 2^16 and halves each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One training, ready to start.

    Attributes:
        model: What the training calls.
        optimizer: What `step` calls once.
        step: Trains for one step: forward, backward, `optimizer.step()`. May return the loss.
    """

    model: nn.Module
    optimizer: Optimizer
    step: Callable[[], Any]


Build = Callable[[], Subject]


def built_in() -> Subject:
    """A small network with what is easily disturbed: dropout, batch statistics, writing in place."""
    width, samples = 256, 2048
    block = (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Dropout(0.1))
    model = nn.Sequential(nn.Linear(width, width), *block, nn.LayerNorm(width), nn.Linear(width, 16))
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        inputs, labels = torch.randn(samples, width), torch.randint(16, (samples,))
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Subject(model=model, optimizer=optimizer, step=step)


def try_out(build: Build, named: str) -> None:
    """Train a fresh subject without a recording, so that what is wrong with it is not blamed on one.

    Raises:
        ConfigError: A step fails, the optimizer is not called, or subjects share their model.
    """
    subject = build()
    if build().model is subject.model:
        raise _wrong(named, "returns the same model again.", "Make everything anew in each call.")
    calls: list[object] = []
    handle = subject.optimizer.register_step_post_hook(lambda *_: calls.append(None))
    try:
        for _ in range(_SKIPPED_STEPS + 1):
            if not calls:
                subject.step()
    except (Exception, SystemExit) as error:
        raise _failed(f"{named}, step", "calling it", error) from error
    finally:
        handle.remove()
    if not calls:
        raise _wrong(f"{named}, step", "does not call step() of the returned optimizer.", _RETURN)


def load(named: str) -> Build:
    """The function that `named` names, e.g. `script.py:build`, made to return a `Subject`.

    Raises:
        ConfigError: There is no such file or function, or running the file fails.
    """
    file, colon, name = named.rpartition(":")
    if not colon or not file.endswith(".py") or not name:
        raise _wrong(named, "does not name a function in a file.", "Write e.g. train.py:build.")
    path = Path(file)
    if not path.is_file():
        raise _wrong(named, f"{file} does not exist.", "Give the path of a Python file.")
    module = _run(path, named)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        problem = Problem.unknown_name(where=named, kind=f"a function of {file}", found=name, known=functions)
        raise ConfigError("doctor", [problem])
    return lambda: _checked(found, named)


def check_backend(name: str) -> None:
    """Raise unless `torch.compile` knows a backend of this name.

    Raises:
        ConfigError: It does not.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        problem = Problem.unknown_name(where="--backend", kind="a backend of torch.compile", found=name, known=known)
        raise ConfigError("doctor", [problem])


def _run(path: Path, named: str) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look their module up
    sys.path.insert(0, str(path.resolve().parent))  # it may import its neighbours, as when it is run
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _failed(named, f"running {path}", error) from error
    return module


def _checked(build: Callable[[], Any], named: str) -> Subject:
    try:
        built = build()
    except (Exception, SystemExit) as error:
        raise _failed(named, "calling it", error) from error
    if isinstance(built, Subject):
        return built
    if not isinstance(built, (tuple, list)) or len(built) != 3:
        count = f" of {len(built)}" if isinstance(built, (tuple, list)) else ""
        raise _wrong(named, f"returned {_a(type(built).__name__)}{count}.", _RETURN)
    model, optimizer, step = built
    wanted = (
        ("model", model, isinstance(model, nn.Module), "a torch.nn.Module"),
        ("optimizer", optimizer, isinstance(optimizer, Optimizer), "a torch.optim.Optimizer"),
        ("step", step, callable(step), "a function"),
    )
    problems = [
        Problem(where=f"{named}, {what}", what=f"is {_a(type(value).__name__)}, not {kind}.", fix=_RETURN)
        for what, value, fits, kind in wanted
        if not fits
    ]
    if problems:
        raise ConfigError("doctor", problems)
    return Subject(model=model, optimizer=optimizer, step=step)


def _a(name: str) -> str:
    """The name of a class with its article."""
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def _failed(named: str, doing: str, error: BaseException) -> ConfigError:
    says = f"{doing} raised {type(error).__name__}: {error}"
    return _wrong(named, says, "Make it work without traindiff first.")


def _wrong(named: str, what: str, fix: str) -> ConfigError:
    return ConfigError("doctor", [Problem(where=named, what=what, fix=fix)])
