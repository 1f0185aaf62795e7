"""Nodes of the graph that compute otherwise while a dispatch mode is on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from traindiff.taps._torch_compat import hide_dispatch_mode

_COMPUTE_OTHERWISE = ("ProdBackward", "MaskedFillBackward1")
"""How the names begin of nodes that take another formula, which rounds otherwise, while any mode is on.

Of all operators that torch lists for its own tests (`op_db`), these are the ones.
"""

WITHOUT_MODE = "its backward pass computes other bits while it is looked into"


class WithoutMode:
    """Has a mode off while nodes run that would compute otherwise under it.

    Args:
        mode: The mode.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        self._mode = mode
        self._handles: list[Any] = []

    def hook(self, roots: Sequence[Tensor]) -> list[Any]:
        """Follow the graph of a backward pass that is about to run; gives the nodes that would compute otherwise."""
        found = [node for node in _nodes(roots) if node.name().startswith(_COMPUTE_OTHERWISE)]
        for node in found:
            self._handles += self._hooked(node)
        return found

    def unhook(self) -> None:
        """The backward pass has ended."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hooked(self, node: Any) -> tuple[Any, Any]:
        hidden = ExitStack()

        def before(_: Any) -> None:
            hidden.callback(hide_dispatch_mode(self._mode))

        def after(_: Any, __: Any) -> None:
            hidden.close()

        return node.register_prehook(before), node.register_hook(after)


def _nodes(roots: Sequence[Tensor]) -> Iterator[Any]:
    """All nodes of a graph."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
