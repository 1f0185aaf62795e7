"""Who observes a module, a root or an optimizer in compiled code: functions that operators call when it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleObserver:
    """Who observes a module in compiled code, or what that inspects.

    Attributes:
        output: Called with an output in the forward pass, which does not know whether it requires a gradient, and its
            slot; of an inspected tensor, its name.
        gradient: Called with the gradient of that output, and the slot.
        no_gradient: Called with the slot where the output is a parameter or an input: a hook on it in compiled code
            would never be removed.
    """

    output: Callable[[Tensor, str], None]
    gradient: Callable[[Tensor, str], None] = lambda *_: None
    no_gradient: Callable[[str], None] = lambda *_: None


@dataclass(frozen=True, slots=True, kw_only=True)
class RootObserver:
    """Who observes the forward passes of the root in compiled code.

    Attributes:
        begin: Called with the inputs by slot, and `evaluating`, when one begins.
        end: Called when it has ended.
    """

    begin: Callable[..., None]
    end: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObserver:
    """Who observes the calls of an optimizer in compiled code.

    Attributes:
        begin: Called when one begins: nothing is written yet.
        end: Called when it has ended; what it computed may be written when the compiled code returns, not before.
    """

    begin: Callable[[], None]
    end: Callable[[], None] = lambda: None
