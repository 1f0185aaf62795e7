"""What has weak references to tensors of the training lets go of them before torch swaps the content of two tensors.

`Module.to` and `load_state_dict` may do that (with `torch.__future__.set_swap_module_params_on_conversion`, and always
for some classes of tensors), and refuse it for a tensor to which there is a weak reference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

import torch

from traindiff.observe.common.listeners import Listeners


class HoldsTensors(ABC):
    """Has weak references to tensors of the training. A subclass calls `__init__`."""

    def __init__(self) -> None:
        _holders[id(self)] = self

    @abstractmethod
    def forget_tensors(self) -> None:
        """Drop all of them, as if the tensors were gone."""


_holders: WeakValueDictionary[int, HoldsTensors] = WeakValueDictionary()


def _install() -> None:
    _sessions.replace(torch.utils, "swap_tensors", _prepared(torch.utils.swap_tensors))


def _prepared(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def swap_tensors(*args: Any, **named: Any) -> None:
        for one in list(_holders.values()):
            one.forget_tensors()
        original(*args, **named)

    return swap_tensors


_sessions: Listeners[object] = Listeners(_install)
attach = _sessions.attach
"""Begin to watch for swaps, for one session; close the result to end that."""
