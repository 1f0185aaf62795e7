"""No text and no choice depends on the order of a set, which is another one in each process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import traindiff

SOURCE = Path(traindiff.__file__).parent
OF_SETS = {"intersection", "union", "difference", "symmetric_difference"}
WITHOUT_ORDER = {"all", "any", "frozenset", "len", "max", "min", "set", "sorted", "sum", "update", "isdisjoint"}
"""Functions whose result does not depend on the order of what they are given."""


def is_set(node: ast.expr) -> bool:
    """True if an expression is clearly a set."""
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in OF_SETS
        case ast.BinOp(left=left, right=right, op=ast.BitAnd() | ast.BitOr() | ast.Sub() | ast.BitXor()):
            return any(is_set(one) or is_keys(one) for one in (left, right))
    return False


def is_keys(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "keys"


def in_order_of_a_set(tree: ast.AST) -> Iterator[int]:
    """Lines that go through a set one by one, where the order may matter."""
    unordered: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in WITHOUT_ORDER:
                unordered.update(node.args)
        match node:
            case ast.For(iter=given, lineno=line) if is_set(given):
                yield line
            case ast.ListComp() | ast.GeneratorExp() | ast.DictComp() if node not in unordered:
                if any(is_set(one.iter) for one in node.generators):
                    yield node.lineno


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_nothing_is_done_in_the_order_of_a_set(file: Path) -> None:
    assert list(in_order_of_a_set(ast.parse(file.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("for one in a.keys() & b.keys(): print(one)", [1]),
        ("', '.join(str(one) for one in {2, 3} - c)", [1]),
        ("[one for one in set(a)]", [1]),
        ("x = {one: 1 for one in a.intersection(b)}", [1]),
        ("for one in sorted(a.keys() & b.keys()): print(one)", []),
        ("any(one for one in set(a))", []),
        ("found = {one + 1 for one in set(a)}", []),
        ("for one in a | b: print(one)", []),
    ],
)
def test_what_goes_in_the_order_of_a_set_is_found(text: str, found: list[int]) -> None:
    assert list(in_order_of_a_set(ast.parse(text))) == found
