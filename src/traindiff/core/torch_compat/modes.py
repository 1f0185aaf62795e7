"""Private names of torch's modes, which see operators and functions before they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # it has no public name


def take_dispatch_modes() -> list[Any]:
    """Take all dispatch modes off this thread's stack; returns them, the outermost first.

    There is no public way. torch's own `_disable_current_modes` does it like this, for the length of a block.
    """
    count = num_dispatch_modes()
    if not count:
        return []
    from torch.utils._python_dispatch import _pop_mode

    return [_pop_mode() for _ in range(count)][::-1]


num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes on this thread's stack. There is no public way to ask."""

_num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def has_function_modes() -> bool:
    """True if a `TorchFunctionMode` is on this thread's stack. There is no public way to ask."""
    return _num_function_modes() > 0


def put_dispatch_modes(modes: Iterable[Any]) -> None:
    """Put dispatch modes on this thread's stack, above those that are there."""
    for mode in modes:
        from torch.utils._python_dispatch import _push_mode

        _push_mode(mode)


without_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction
"""Inside it, calls of torch's functions are shown neither to modes nor to subclasses of tensors.

The public name, `torch._C.DisableTorchFunctionSubclass`, leaves modes on.
"""


def with_torch_function() -> AbstractContextManager[Any]:
    """Inside it, calls are shown to them again. There is no public way."""
    guard: AbstractContextManager[Any] = torch._C._EnableTorchFunction()
    return guard


def leave_dispatch_mode(mode: Any) -> None:
    """Take a `TorchDispatchMode` off this thread's stack, even if other modes were entered after it.

    Publicly, modes can only be left in the reverse order; a recording may be closed at any time.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

    stack = _get_current_dispatch_mode_stack()
    if mode not in stack:  # it is on the stack of another thread
        return
    above = [_pop_mode() for _ in stack[stack.index(mode) + 1 :]]
    if getattr(mode, "old_dispatch_mode_flags", True):
        mode.__exit__(None, None, None)
    else:  # it was left already, in a backward pass, after which autograd has put it back
        _pop_mode()
    put_dispatch_modes(reversed(above))


def hide_dispatch_mode(mode: Any) -> Callable[[], None]:
    """Take a `TorchDispatchMode` off this thread's stack; returns a function that puts it back, on top."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

    stack = _get_current_dispatch_mode_stack()
    if mode not in stack:
        return lambda: None
    place = stack.index(mode)
    for _ in stack[place:]:
        _pop_mode()
    put_dispatch_modes(stack[place + 1 :])
    return lambda: None if mode in _get_current_dispatch_mode_stack() else _push_mode(mode)
