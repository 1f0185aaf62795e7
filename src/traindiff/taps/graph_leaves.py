"""Whether a backward pass can reach certain parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

_IN_PYTHON: type[Any] = BackwardCFunction


def may_reach(roots: Iterable[Tensor], parameter_ids: Collection[int]) -> bool:
    """Whether a backward pass from `roots` may bring a gradient to one of the parameters.

    Walks through the graph until it finds one, as a rule after a few nodes. A function written in Python
    (reentrant checkpointing) may hide parameters, so it counts as one that reaches them.

    Args:
        roots: Tensors on which backward is called.
        parameter_ids: Ids of parameters.

    Returns:
        False only if the graph ends in other tensors alone.
    """
    waiting = [root.grad_fn for root in roots]
    seen = set(waiting)
    reaches_others = False
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if isinstance(node, _IN_PYTHON):
            return True
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) in parameter_ids:
                return True
            reaches_others = True
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return not reaches_others
