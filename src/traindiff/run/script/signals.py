"""Signals of a script that trains: it makes optimizers, calls modules, starts processes.

torch has no hooks for these, or none that come early enough: a forward hook that is added while the forward pass begins
misses that pass. So methods are replaced, and restored when they are no longer needed.
"""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable
from functools import wraps
from multiprocessing.process import BaseProcess
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer

from traindiff.core.torch_compat.compiling import exclude_from_compilation
from traindiff.observe.common.listeners import Listeners
from traindiff.observe.torch.session.recorder import Recorder


def is_recorded_by_script() -> str:
    """Path of a recording that this process is writing; empty if there is none."""
    open_ones = (one for one in gc.get_objects() if issubclass(type(one), Recorder) and one.is_recording)
    return next((one.path for one in open_ones), "")


def _replace_init() -> None:
    original = Optimizer.__init__

    @wraps(original)
    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for listener in optimizer_made:
            listener(self)

    optimizer_made.replace(Optimizer, "__init__", init)


def _replace_call() -> None:
    original = nn.Module.__call__

    @wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            for listener in module_called:
                listener(self)
        return original(self, *args, **kwargs)

    exclude_from_compilation(call, callees=False)
    module_called.replace(nn.Module, "__call__", call)


def _before(owner: type, name: str, about: Callable[..., object]) -> Listeners[Callable[[Any], None]]:
    """Listeners that are called before a method; `about` picks their argument from the method's."""

    def replace() -> None:
        original = getattr(owner, name)

        @wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            for listener in listeners:
                listener(about(*args, **kwargs))
            return original(*args, **kwargs)

        listeners.replace(owner, name, method)

    listeners: Listeners[Callable[[Any], None]] = Listeners(replace)
    return listeners


optimizer_made: Listeners[Callable[[Optimizer], None]] = Listeners(_replace_init)
"""Listeners that are called with each optimizer after it got its parameters."""

module_called: Listeners[Callable[[nn.Module], None]] = Listeners(_replace_call)
"""Listeners that are called before each call of a module that is not compiled, before torch looks at its hooks."""

process_started = _before(BaseProcess, "start", lambda process: process)
"""Listeners that are called with each process that Python's multiprocessing starts."""

program_started = _before(subprocess.Popen, "__init__", lambda _, args, *__, **___: args)
"""Listeners that are called with the command of each program that is started."""

recorder_made = _before(Recorder, "__init__", lambda _, path, *__, **___: path)
"""Listeners that are called with the path before a further recording begins."""
