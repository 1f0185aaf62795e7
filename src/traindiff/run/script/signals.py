"""What the script does that a recording begins with: it makes optimizers, calls modules, starts processes.

There are no hooks for these, or none that come early enough: hooks on a module that are added while its forward pass
begins miss it. So methods are replaced, and put back when they are no longer of interest.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from multiprocessing.process import BaseProcess
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer

from traindiff.core.torch_compat.execution import exclude_from_compilation
from traindiff.observe.common.listeners import Listeners


def on_optimizer_made(listener: Callable[[Optimizer], None]) -> ExitStack:
    """Have `listener` called with each optimizer when it has been given its parameters. Close the result to end it."""
    return _made.attach(listener)


def on_module_called(listener: Callable[[nn.Module], None]) -> ExitStack:
    """Have `listener` called before each call of a module that is not compiled, before its hooks are looked at."""
    return _called.attach(listener)


def on_process_started(listener: Callable[[BaseProcess], None]) -> ExitStack:
    """Have `listener` called with each process that Python's multiprocessing starts."""
    return _started.attach(listener)


def on_program_started(listener: Callable[[object], None]) -> ExitStack:
    """Have `listener` called with the command of each program that is started. Close the result to end it."""
    return _launched.attach(listener)


def _replace_init() -> None:
    original = Optimizer.__init__

    @wraps(original)
    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for listener in _made:
            listener(self)

    _made.replace(Optimizer, "__init__", init)


def _replace_call() -> None:
    original = nn.Module.__call__

    @wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            for listener in _called:
                listener(self)
        return original(self, *args, **kwargs)

    exclude_from_compilation(call, callees=False)
    _called.replace(nn.Module, "__call__", call)


def _replace_start() -> None:
    original = BaseProcess.start

    @wraps(original)
    def start(self: BaseProcess) -> None:
        for listener in _started:
            listener(self)
        original(self)

    _started.replace(BaseProcess, "start", start)


def _replace_popen() -> None:
    original = subprocess.Popen.__init__

    @wraps(original)
    def init(self: subprocess.Popen[Any], args: Any, *more: Any, **settings: Any) -> None:
        for listener in _launched:
            listener(args)
        original(self, args, *more, **settings)

    _launched.replace(subprocess.Popen, "__init__", init)


_made: Listeners[Callable[[Optimizer], None]] = Listeners(_replace_init)
_called: Listeners[Callable[[nn.Module], None]] = Listeners(_replace_call)
_started: Listeners[Callable[[BaseProcess], None]] = Listeners(_replace_start)
_launched: Listeners[Callable[[object], None]] = Listeners(_replace_popen)
