"""What a mutant changes: cosmic-ray's operators, without those that mostly make nonsense, and four of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import parso
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

Changes = Callable[[Any], Iterator[tuple[Any, str]]]
"""Children of a node of parso's tree, each with the text that replaces it."""

THEIRS = (
    "NumberReplacer", "AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop",
    "ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_USub",
)  # fmt: skip

COMPARISONS = (
    "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_Gt", "Gt_Lt", "LtE_Gt", "GtE_Lt", "Eq_NotEq", "NotEq_Eq", "Is_IsNot",
    "IsNot_Is",
)  # fmt: skip
"""A limit that is itself let in or out, and a comparison turned round. cosmic-ray has each operator against each."""

ARITHMETIC = (
    "Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Add", "Pow_Mul", "BitAnd_BitOr", "BitOr_BitAnd",
    "BitXor_BitOr", "LShift_RShift", "RShift_LShift",
)  # fmt: skip

EXTREMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@cache
def operators() -> dict[str, Operator]:
    """All that are used, by name."""
    names = [
        *THEIRS,
        *(f"ReplaceComparisonOperator_{name}" for name in COMPARISONS),
        *(f"ReplaceBinaryOperator_{name}" for name in ARITHMETIC),
    ]
    ours = (other_membership, other_filter, nothing_returned, other_extreme)
    return {name: get_operator(f"core/{name}")() for name in names} | {one.__name__: Replacement(one) for one in ours}


class Replacement(Operator):  # type: ignore[misc]
    """An operator that replaces children of a node."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Start and end of each child that is replaced."""
        return ((child.start_pos, child.end_pos) for child, _ in self._changes(node))

    def mutate(self, node: Any, index: int) -> Any:
        """The node, with one child replaced in place."""
        child, text = next(islice(self._changes(node), index, None))
        node.children[node.children.index(child)] = parso.parse(f" {text}")
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        """None; cosmic-ray asks for them."""
        return ()


def other_membership(node: Any) -> Iterator[tuple[Any, str]]:
    """`in` for `not in`, and the other way round."""
    if node.type == "comparison":
        for child in node.children[1::2]:
            if (text := " ".join(child.get_code().split())) in ("in", "not in"):
                yield child, "not in" if text == "in" else "in"


def other_filter(node: Any) -> Iterator[tuple[Any, str]]:
    """A comprehension of what its condition leaves out."""
    if node.type == "comp_if":
        yield node.children[1], f"not ({node.children[1].get_code().strip()})"


def nothing_returned(node: Any) -> Iterator[tuple[Any, str]]:
    """None in place of a result.

    False of a function that answers with a `bool` is left alone: a condition takes both alike, and mypy finds None
    there. Of a function that answers with `bool | None`, None is a third answer. An empty text and 0 are no None where
    texts and numbers are put together.
    """
    if node.type != "return_stmt" or (result := node.children[1].get_code().strip()) == "None":
        return
    if result == "False" and _answer(node) == "bool":
        return
    yield node.children[1], "None"


def _answer(node: Any) -> str:
    """The type that the function around a node returns, as it is annotated."""
    annotation = getattr(node.search_ancestor("funcdef"), "annotation", None)
    return annotation.get_code().strip() if annotation else ""


def other_extreme(node: Any) -> Iterator[tuple[Any, str]]:
    """`min` for `max`, `any` for `all`, and the other way round."""
    if node.type == "atom_expr" and node.children[0].get_code().strip() in EXTREMES:
        yield node.children[0], EXTREMES[node.children[0].get_code().strip()]
