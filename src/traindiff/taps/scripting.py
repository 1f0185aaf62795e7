"""Let TorchScript compile a module as if it were not observed: it compiles the hooks on it, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import nn

from traindiff.taps._torch_compat import script_compiler
from traindiff.taps.left_behind import NUMBER, LeftBehind
from traindiff.taps.listeners import Listeners

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def hide_from_scripting() -> ExitStack:
    """Have `torch.jit.script` see modules without our hooks. Close the result to leave it as it was."""
    return _sessions.attach(None)


def _replace_compiler() -> None:
    compiler = script_compiler()
    original = compiler.create_script_module

    @wraps(original)
    def create_script_module(nn_module: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as undo:
            for module in nn_module.modules() if isinstance(nn_module, nn.Module) else ():
                undo.enter_context(_as_it_was(module))
            return original(nn_module, *args, **kwargs)

    _sessions.replace(compiler, "create_script_module", create_script_module)


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Inside it, a module is without what a session has put on it."""
    kept = {name: dict(getattr(module, name)) for name in _HOOKS}
    number = vars(module).pop(NUMBER, None)
    for name, hooks in kept.items():
        for key, hook in hooks.items():
            if isinstance(hook, LeftBehind):
                del getattr(module, name)[key]
    try:
        yield
    finally:
        for name, hooks in kept.items():
            getattr(module, name).clear()
            getattr(module, name).update(hooks)
        if number is not None:
            vars(module)[NUMBER] = number


_sessions: Listeners[None] = Listeners(_replace_compiler)
