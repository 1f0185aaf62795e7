"""The forward passes that are running, without those that an interrupt has ended: torch calls no hook after these."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import get_ident
from typing import NamedTuple

from torch import nn

from traindiff.core.torch_compat.training import running_calls


class Pass(NamedTuple):
    """A forward pass that has begun.

    Attributes:
        module: The module that was called; None if compiled code has told of it.
        inside: What is left when it ends; None if it is a part of another pass.
        thread: The thread on which it runs.
        has_frame: The stack of that thread shows the call of the module. Compiled code may leave no frame of it.
    """

    module: nn.Module | None
    inside: AbstractContextManager[None] | None
    thread: int
    has_frame: bool


class RunningPasses:
    """The passes that are running, outermost first.

    Torch calls the hooks after a forward pass that raised an `Exception`, but not after one that `KeyboardInterrupt` or
    `asyncio.CancelledError` has ended. The next pass, or `unwind`, removes what that one has left.

    Args:
        on_left: Called with each pass that has ended unseen, innermost first.
    """

    def __init__(self, on_left: Callable[[Pass], None]) -> None:
        self._passes: list[Pass] = []
        self._on_left = on_left

    def __bool__(self) -> bool:
        return bool(self._passes)

    def begin(self, module: nn.Module | None, inside: AbstractContextManager[None] | None) -> None:
        """Note that a pass has begun; see `Pass`."""
        has_frame = module is not None and next(running_calls(), None) is module
        self._passes.append(Pass(module, inside, get_ident(), has_frame))

    def end(self, module: nn.Module | None) -> Pass | None:
        """Remove and return the innermost pass of a module, which has ended; None if its beginning was not seen."""
        for index in reversed(range(len(self._passes))):
            if self._passes[index].module is module:
                self._leave(index + 1)
                return self._passes.pop()
        return None

    def unwind(self, *, beginning: nn.Module | None = None, without_frame: bool = False) -> None:
        """Remove the passes that no longer run. Costs nothing if none was thought to be running.

        Args:
            beginning: The module whose call begins on this thread, and contains none of the passes.
            without_frame: Remove passes of which the stack shows nothing, too.
        """
        if not self._passes:
            return
        threads = dict.fromkeys(one.thread for one in self._passes)
        calls = {thread: [*running_calls(thread)] for thread in threads}
        here = calls.get(get_ident())
        if here and here[0] is beginning:
            del here[0]  # calls come innermost first
        for index, one in enumerate(self._passes):
            if not (_contain(calls[one.thread], one.module) if one.has_frame else not without_frame):
                self._leave(index)
                return

    def _leave(self, index: int) -> None:
        """Remove the passes from this one on."""
        while len(self._passes) > index:
            self._on_left(self._passes.pop())


def _contain(calls: list[nn.Module], module: nn.Module | None) -> bool:
    """True if a module is among the calls; takes it, and those around it, away."""
    while calls:
        if calls.pop() is module:
            return True
    return False
