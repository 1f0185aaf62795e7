"""Count, in the graph of a backward pass, how often each parameter is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from traindiff.observe.torch.hooks.backward_calls import nodes_of

_HANDS_ON = (
    "TBackward", "ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "TransposeBackward", "PermuteBackward",
    "ToCopyBackward", "SplitWithSizesBackward", "SplitBackward", "SliceBackward", "ChunkBackward", "SelectBackward",
    "UnbindBackward", "UnsqueezeBackward", "SqueezeBackward", "AliasBackward", "CloneBackward", "ExpandBackward",
    "AsStridedBackward", "NumpyTBackward", "MatrixHBackward", "MHBackward", "NarrowBackward", "DetachBackward",
)  # fmt: skip
"""Names, without the number of the overload, of nodes that hand on what they are given: views, copies, and casts."""


def uses(roots: Iterable[Tensor]) -> Counter[int]:
    """The number of operations on each leaf of the graph, by the leaf's id.

    An operation on a view, a copy or a cast of a leaf is one on the leaf.

    Args:
        roots: Tensors on which `backward` is called.
    """
    found: Counter[int] = Counter()
    leaves: dict[Any, int] = {}
    for node in nodes_of(roots):
        if _hands_on(node):
            continue
        for following, _ in node.next_functions:
            if following is not None and (leaf := _leaf(following, leaves)):
                found[leaf] += 1
    return found


def _leaf(node: Any, known: dict[Any, int]) -> int:
    """The id of the leaf whose view, copy or cast a node makes; 0 if it makes something else."""
    passed = []
    while node not in known:
        passed.append(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            known[node] = id(variable)
        elif not _hands_on(node) or node.next_functions[0][0] is None:
            known[node] = 0
        else:
            node = node.next_functions[0][0]
    for one in passed:
        known[one] = known[node]
    return known[node]


def _hands_on(node: Any) -> bool:
    return len(node.next_functions) == 1 and node.name().rstrip("0123456789") in _HANDS_ON
