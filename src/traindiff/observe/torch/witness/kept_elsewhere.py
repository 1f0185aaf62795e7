"""Know which operations do not keep what their backward passes need, but have handed it to hooks."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch

from traindiff.core.torch_compat.autograd import (
    SAVED_TENSORS_POP,
    SAVED_TENSORS_PUSH,
    keeps_saved_tensors_elsewhere,
    next_node_number,
    node_number,
    saved_tensors_module,
)
from traindiff.observe.common.listeners import Listeners

_MOST_RANGES = 4096
"""Ranges of nodes that are remembered; nodes before the oldest one count as kept elsewhere."""


class KeptElsewhere:
    """Tells nodes of the graph whose saved tensors hooks have taken: those of activation checkpointing and offloading.

    To read such a tensor would compute it again, or bring it back, and checkpointing allows that once. There is no way
    to ask a node. So the functions that switch hooks on and off are replaced while at least one tap is attached, and
    the numbers of the nodes that are made in between are noted.
    """

    def __init__(self) -> None:
        self._from = next_node_number()
        self._ranges: deque[tuple[int, int]] = deque()
        self._open: dict[int, list[int]] = {}  # first numbers, by thread
        if keeps_saved_tensors_elsewhere():
            self.switched_on()

    def attach(self) -> ExitStack:
        """Note hooks from now on. Close the result to end it."""
        return _listeners.attach(self)

    def __call__(self, node: Any) -> bool:
        """True if a node may have handed saved tensors to hooks."""
        number = node_number(node)
        if number < self._from or any(number >= first[0] for first in self._open.values() if first):
            return True
        return any(first <= number < end for first, end in self._ranges)

    def switched_on(self) -> None:
        """Hooks take what the operations of this thread save from now on."""
        self._open.setdefault(threading.get_ident(), []).append(next_node_number())

    def switched_off(self) -> None:
        """The last ones of these hooks are gone."""
        begun = self._open.get(threading.get_ident())
        if not begun:
            return
        first = begun.pop()
        if begun or first == next_node_number():
            return
        self._ranges.append((first, next_node_number()))
        if len(self._ranges) > _MOST_RANGES:
            self._from = max(self._from, self._ranges.popleft()[1])


def _install() -> None:
    for name, tell in (
        (SAVED_TENSORS_PUSH, KeptElsewhere.switched_on),
        (SAVED_TENSORS_POP, KeptElsewhere.switched_off),
    ):
        _replace(name, tell)


def _replace(name: str, tell: Any) -> None:
    original = getattr(saved_tensors_module, name)

    @wraps(original)
    def function(*args: Any) -> Any:
        if not torch.compiler.is_compiling():
            for listener in _listeners:
                tell(listener)
        return original(*args)

    _listeners.replace(saved_tensors_module, name, function)


_listeners: Listeners[KeptElsewhere] = Listeners(_install)
