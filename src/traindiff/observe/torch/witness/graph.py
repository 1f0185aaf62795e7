"""Find, in the graph of a backward pass, the operations that use each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from traindiff.core.torch_compat.autograd import node_number
from traindiff.observe.torch.hooks.backward_calls import nodes_of

CASTS = ("ToCopyBackward", "AliasBackward", "CloneBackward", "DetachBackward")
"""Names, without the number of the overload, of nodes that hand on all elements in their places."""

TRANSPOSES = ("TBackward", "NumpyTBackward", "MatrixHBackward", "MHBackward")

PERMUTES = ("TransposeBackward", "PermuteBackward")

SELECT, EXPAND = "SelectBackward", "ExpandBackward"

RESHAPES = (
    "ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "UnsqueezeBackward", "SqueezeBackward",
)  # fmt: skip

_HANDS_ON = frozenset(
    (
        *CASTS, *TRANSPOSES, *PERMUTES, *RESHAPES, "SplitWithSizesBackward", "SplitBackward", "SliceBackward",
        "ChunkBackward", SELECT, "UnbindBackward", EXPAND, "AsStridedBackward", "NarrowBackward",
    )
)  # fmt: skip
"""The same of all nodes that hand on what they are given: views, copies, and casts."""


class Place(NamedTuple):
    """Where an operation uses a parameter.

    Attributes:
        node: The node of the operation.
        number: Which of its inputs it is.
    """

    node: Any
    number: int


@dataclass(slots=True)
class Graph:
    """The leaves of a graph.

    Attributes:
        places: The operations on each leaf, by the leaf's id. An operation on a view, a copy or a cast of a leaf is
            one on the leaf.
        leaves: The nodes that add to the gradients of the leaves, by the leaf's id.
        followed: How many operations on each leaf are those of calls that were followed.
        calls: The nodes of the outputs of these calls, each with the ids of the leaves that the call uses.
    """

    places: dict[int, list[Place]] = field(default_factory=dict)
    leaves: dict[int, Any] = field(default_factory=dict)
    followed: Counter[int] = field(default_factory=Counter)
    calls: list[tuple[Any, Sequence[int]]] = field(default_factory=list)


def graph_of(roots: Iterable[Tensor], calls: Callable[[int], Sequence[int]]) -> Graph:
    """Look through the graph of a backward pass.

    Args:
        roots: Tensors on which `backward` is called.
        calls: Gives the ids of the leaves that a followed call uses, by the number of the node of its output.
    """
    found = Graph()
    known: dict[Any, int] = {}
    for node in nodes_of(roots):
        if used := calls(node_number(node)):
            found.followed.update(used)
            found.calls.append((node, used))
        if _hands_on(node):
            continue
        for number, (following, _) in enumerate(node.next_functions):
            if following is not None and (leaf := _leaf(following, known, found.leaves)):
                found.places.setdefault(leaf, []).append(Place(node, number))
    return found


def chain_of(place: Place) -> list[Any]:
    """The nodes of views, copies and casts from the input of an operation back to its leaf; the last is the leaf's."""
    node = place.node.next_functions[place.number][0]
    found = [node]
    while getattr(node, "variable", None) is None:
        node = node.next_functions[0][0]
        found.append(node)
    return found


def inside_call(node: Any) -> list[Any]:
    """The nodes of a call from that of its output back to its operation, which the last one is."""
    found = [node]
    while _hands_on(found[-1]) and (following := found[-1].next_functions[0][0]) is not None:
        found.append(following)
    return found


def kind_of(node: Any) -> str:
    """The name of a node, without the number of the overload."""
    name: str = node.name()
    return name.rstrip("0123456789")


def _leaf(node: Any, known: dict[Any, int], leaves: dict[int, Any]) -> int:
    """The id of the leaf whose view, copy or cast a node makes; 0 if it makes something else."""
    passed = []
    while node not in known:
        passed.append(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            known[node] = id(variable)
            leaves[id(variable)] = node
        elif not _hands_on(node) or node.next_functions[0][0] is None:
            known[node] = 0
        else:
            node = node.next_functions[0][0]
    for one in passed:
        known[one] = known[node]
    return known[node]


def _hands_on(node: Any) -> bool:
    return len(node.next_functions) == 1 and kind_of(node) in _HANDS_ON
