"""Describe, once for each module, whether gradients flow through it to what it was given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from traindiff.core.torch_compat.autograd import inside_backward
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.nested import tensors

NAME = "gradient_paths"
"""Key in `rank.json`."""

THROUGH, CUT, UNNEEDED = "through", "cut", "unneeded"
"""Gradients reach all inputs that need one; do not reach some of them; no input needs one."""

_MOST_NODES = 2000
"""Nodes of the graph that are looked at for one module; a larger one is not described."""


class GradientPaths:
    """Looks at the graph of each module's first call that keeps gradients.

    Args:
        context: The training.
    """

    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._found: dict[str, str] = {}
        self._is_new = False

    def see(self, path: str, args: tuple[Any, ...], output: Any) -> None:
        """Note the graph between a module's output and what it was given by position."""
        if path in self._found or not torch.is_grad_enabled() or inside_backward():
            return
        given = [one for _, one in tensors(args, "") if one.is_floating_point()]
        starts = [one.grad_fn for _, one in tensors(output, "") if one.grad_fn is not None]
        if not given or not starts:
            return
        needing = [one for one in given if one.requires_grad]
        reached = _reaches(starts, needing) if needing else None
        if needing and reached is None:
            return
        self._found[path] = UNNEEDED if not needing else THROUGH if reached else CUT
        self._is_new = True

    def describe(self) -> None:
        """Write what is new into `rank.json`."""
        if self._is_new:
            self._is_new = False
            self._context.describe(NAME, self._found)


def _reaches(starts: Iterable[Node], given: Iterable[Tensor]) -> bool | None:
    """True if gradients that begin at some nodes reach all tensors; None if there are too many nodes to tell."""
    ends = [one.grad_fn for one in given if one.grad_fn is not None]
    leaves = {id(one) for one in given if one.grad_fn is None}
    missing = {id(one) for one in ends}  # torch keeps one object for a node while anybody holds it
    waiting, seen = list(starts), {id(one): one for one in starts}
    while waiting and (missing or leaves):
        node = waiting.pop()
        missing.discard(id(node))
        leaves.discard(id(getattr(node, "variable", None)))
        for following in _behind(node):
            if id(following) not in seen:
                seen[id(following)] = following
                waiting.append(following)
        if len(seen) > _MOST_NODES:
            return None
    return not (missing or leaves)


def _behind(node: Node) -> Iterator[Node]:
    return (following for following, _ in node.next_functions if following is not None)
