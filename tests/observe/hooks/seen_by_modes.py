"""Modes that a training may be inside, each with what it has seen at the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

Entered = AbstractContextManager[Callable[[], Any]]
"""A mode that is on inside; what it gives says what the mode has seen."""


class Operators(TorchDispatchMode):
    """Writes down every operator, with the shapes of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        shapes = [tuple(one.shape) for one in args if isinstance(one, Tensor)]
        self.seen.append(f"{func}{shapes}")
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Writes down every function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.seen.append(resolve_name(func) or str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def operators() -> Any:
    with Operators() as mode:
        yield lambda: mode.seen


@contextmanager
def functions() -> Any:
    with Functions() as mode:
        yield lambda: mode.seen


@contextmanager
def flops() -> Any:
    with FlopCounterMode(display=False) as mode:
        yield lambda: {key: dict(counts) for key, counts in mode.get_flop_counts().items()}


@contextmanager
def debugging() -> Any:
    with DebugMode(record_torchfunction=True, record_realtensor=True) as mode:
        yield lambda: re.sub("0x[0-9a-f]+", "...", mode.debug_string())


@contextmanager
def saved_tensors() -> Any:
    seen: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: seen


MODES: dict[str, Callable[[], Entered]] = {
    "operators": operators,
    "functions": functions,
    "flops": flops,
    "debugging": debugging,
    "saved_tensors": saved_tensors,
}
