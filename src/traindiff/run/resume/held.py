"""What a training holds beside its model and its optimizer: schedulers, scalers, generators, other weights, counters.

They are found where the training uses them: in the variables of its functions, in objects that these hold, and in the
global variables that they name. Nothing is called except `state_dict`, and nothing is changed.
"""

from __future__ import annotations

import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from inspect import isgenerator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import traindiff
from traindiff.core.torch_compat.training import buffers_in, modules_by_name, modules_in, parameters_in
from traindiff.run.config.training import Training

MOST_DEPTH = 6
MOST_FOUND = 20_000
MOST_NUMBERS = 100
"""Entries up to which the numbers in a list or mapping are state."""

Generators = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_LIBRARIES = tuple(
    {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {Path(traindiff.__file__).resolve().parent, Path(torch.__file__).resolve().parent}
)


def kind_of(value: object) -> str:
    """What an object is that a training holds; empty if its parts are to be looked at instead."""
    kinds: tuple[tuple[Any, str], ...] = (
        (LRScheduler, "scheduler"), (GradScaler, "scaler"), (Generators, "generator"), (nn.Module, "weights"),
        (Optimizer, "optimizer"), (Tensor, "tensor"), ((bool, int, float, str), "counter"),
    )  # fmt: skip
    for types, kind in kinds:
        if isinstance(value, types):
            return kind
    stateful = not isinstance(value, type) and callable(getattr(type(value), "state_dict", None))
    return "object" if stateful else ""


def gives_state(value: Any) -> bool:
    """True if `state_dict()` returns: a library's class may have one that works with some settings only."""
    try:
        value.state_dict()
    except Exception:  # noqa: BLE001  any class of the user's or a library's
        return False
    return True


def find_held(training: Training) -> dict[str, Any]:
    """The objects that a training holds beside its model and its optimizer, by the names that it has for them."""
    looked = _Search(training)
    for name, value in training.state.items():
        looked.visit(str(name), value)
    for name in ("step", "loss", "save", "load", "batches"):
        looked.visit(name, getattr(training, name))
    for path, module in modules_by_name(training.model).items():
        if not (_is_users(module) or type(module).__module__.startswith("torch.nn.modules.")):
            continue  # an engine's, which counts for itself
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, (*Generators, bool, int, float)):
                looked.visit(".".join(filter(None, ("model", path, name))), value)
    return looked.found


def optimizers_of(training: Training) -> list[Optimizer] | None:
    """The optimizers of the model's parameters that the training's functions use; None if none is found."""
    parameters = {id(one) for one in parameters_in(training.model)}
    found = [
        one
        for one in find_held(training).values()
        if isinstance(one, Optimizer)
        and any(id(parameter) in parameters for group in one.param_groups for parameter in group["params"])
    ]
    return found or None


class _Search:
    def __init__(self, training: Training) -> None:
        self.found: dict[str, Any] = {}
        model, given = training.model, training.optimizer
        optimizers = (
            given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else [given]
        )
        self._known = {id(one) for one in (model, *optimizers, *parameters_in(model), *buffers_in(model))}
        self._known |= {id(one) for one in modules_in(model)}
        self._seen: set[int] = set()

    def visit(self, name: str, value: Any, depth: int = 0) -> None:
        """Look at a value that the training calls `name`, and at what it holds."""
        number = isinstance(value, (bool, int, float, str))
        if value is None or depth > MOST_DEPTH or len(self.found) >= MOST_FOUND or id(value) in self._known:
            return
        if not number:
            if id(value) in self._seen:
                return
            self._seen.add(id(value))
        if (kind := kind_of(value)) and (kind != "object" or gives_state(value)):
            self.found[self._free(name)] = value
            return
        for inner, one in self._inside(name, value):
            self.visit(inner, one, depth + 1)

    def _free(self, name: str) -> str:
        number, free = 1, name
        while free in self.found:
            number += 1
            free = f"{name} ({number})"
        return free

    def _inside(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, FunctionType):
            yield from _variables(value)
        elif isinstance(value, MethodType):
            yield name, value.__self__
            yield name, value.__func__
        elif isinstance(value, partial):
            yield from ((name, one) for one in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, Mapping):
            yield from ((f"{name}[{key}]", one) for key, one in value.items() if _is_state(one, value))
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}[{number}]", one) for number, one in enumerate(value) if _is_state(one, value))
        elif isgenerator(value):
            frame = value.gi_frame
            yield from frame.f_locals.items() if frame is not None else ()
        elif isinstance(value, DataLoader):
            yield from (
                (f"{name}.{one}", getattr(value, one, None)) for one in ("generator", "sampler", "batch_sampler")
            )
        elif isinstance(value, torch.utils.data.Sampler) or _is_users(value):
            own = getattr(value, "__dict__", {})
            yield from ((f"{name}.{key}", one) for key, one in own.items())


def _is_state(one: Any, container: Any) -> bool:
    """True unless it is one of many numbers or texts: these are data."""
    return len(container) <= MOST_NUMBERS or not isinstance(one, (bool, int, float, str))


def _is_users(value: Any) -> bool:
    """True for an instance of a class of the user's own."""
    if isinstance(value, (type, ModuleType)) or (
        is_dataclass(value) and type(value).__module__.startswith("traindiff.")
    ):
        return False
    module = sys.modules.get(type(value).__module__)
    return module is not None and not _is_library(getattr(module, "__file__", None), type(value).__module__)


def _is_library(file: str | None, name: str) -> bool:
    if name == "__main__":
        return False
    if file is None:
        return True  # built in
    return any(Path(file).resolve().is_relative_to(one) for one in _LIBRARIES)


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of enclosing functions, and the global ones, that a function names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    if _is_library(function.__code__.co_filename, function.__module__):
        return
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name)
        if not isinstance(value, (type, ModuleType)):
            yield name, value


def _global_names(code: CodeType) -> Iterable[str]:
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return names


def get_state(one: Any) -> Any:
    """The state of a random generator, made of numbers and tensors."""
    if isinstance(one, torch.Generator):
        return one.get_state()
    if isinstance(one, np.random.Generator):
        return plain(one.bit_generator.state)
    if isinstance(one, np.random.RandomState):
        return plain(one.get_state(legacy=False))
    return one.getstate()


def set_state(one: Any, state: Any) -> None:
    """Set a random generator to what `get_state` has returned."""
    if isinstance(one, torch.Generator):
        one.set_state(state)
    elif isinstance(one, np.random.Generator):
        one.bit_generator.state = _arrays(state)
    elif isinstance(one, np.random.RandomState):
        one.set_state(_arrays(state))
    else:
        version, inner, gauss = state
        one.setstate((version, tuple(inner), gauss))


def plain(value: Any) -> Any:
    """The same with lists in place of NumPy's arrays, and numbers in place of its scalars."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value


def _arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _arrays(one) for key, one in value.items()}
    return (
        np.asarray(value, dtype=np.uint64 if max(value, default=0) >> 32 else np.uint32)
        if isinstance(value, list)
        else value
    )


def global_generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Getter and setter of the state of every global random generator, by its name in sentences."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "torch's generator": (torch.get_rng_state, torch.set_rng_state),
        "NumPy's generator": (
            lambda: plain(np.random.get_state(legacy=False)),
            lambda state: np.random.set_state(_arrays(state)),
        ),
        "Python's generator": (random.getstate, lambda state: random.setstate((state[0], tuple(state[1]), state[2]))),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            found[f"torch's generator of cuda:{number}"] = (
                partial(torch.cuda.get_rng_state, number),
                partial(torch.cuda.set_rng_state, device=number),
            )
    return found
