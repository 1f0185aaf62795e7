"""Hooks of the training on nodes of the graph, which may change gradients on their way to a parameter."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from traindiff.core.torch_compat.autograd import hooks_on_node
from traindiff.observe.torch.hooks.inert_on_copy import InertOnCopy, put_last
from traindiff.observe.torch.witness.graph import Graph, Place, chain_of, inside_call


def changed_by_hooks(graph: Graph) -> set[int]:
    """Ids of the leaves whose gradients hooks on nodes may change, after the gradients of calls were looked at.

    Hooks on the nodes of the leaves themselves do not count. On the node of a call's output, our hooks are put behind
    those of the training, so that they see what the node gets.
    """
    has = cache(has_hooks)
    found: set[int] = set()
    for node, leaves in graph.calls:
        put_last(hooks_on_node(node, before=True), InertOnCopy)
        inside = inside_call(node)
        if any(has(one, before=False) for one in inside) or any(has(one, before=True) for one in inside[1:]):
            found.update(leaves)
    found.update(leaf for leaf, places in graph.places.items() if any(_changes(place, has) for place in places))
    return found


def has_hooks(node: Any, *, before: bool) -> bool:
    """True if the training has put hooks on a node, before or after it."""
    return any(not isinstance(hook, InertOnCopy) for hook in hooks_on_node(node, before=before).values())


def _changes(place: Place, has: Callable[..., bool]) -> bool:
    """True if hooks may change the gradient that an operation has computed, on its way to the leaf."""
    chain = chain_of(place)[:-1]
    return any(has(one, before=False) for one in (place.node, *chain)) or any(has(one, before=True) for one in chain)
