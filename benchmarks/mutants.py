"""Mutants of source files: copies with one number, comparison, condition or operator changed."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parso
from benchmarks.mutation_operators import operators
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator

Position = tuple[int, int]
"""Line, from 1, and column, from 0."""

Span = tuple[Position, Position]
"""From the first position to the one behind the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a file can be changed, and how.

    Attributes:
        operator: What it is changed by.
        occurrence: Its number among the places where the operator applies.
        start: Its position.
        lot: A number from 0 to 1, at random.
    """

    operator: Operator
    occurrence: int
    start: Position
    lot: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: Of the file.
        line: Of the change.
        statement: First and last line of the statement around it; of a compound statement, of its head.
        in_function: Whether it is part of a function; what is not runs when the file is imported.
        before: The line as it is.
        after: The line as it becomes.
        source: The whole file, changed.
    """

    path: Path
    line: int
    statement: tuple[int, int]
    in_function: bool
    before: str
    after: str
    source: str


def sample(paths: Iterable[Path], share: float, *, after: float = 0.0) -> tuple[list[Mutant], dict[Path, int]]:
    """Mutants of about a share of the places in these files, and the number of places by file.

    Whether a place is taken depends on its operator and the text of its line only. So the sample stays what it was when
    code is moved, and for the rest when code is changed. `after` a share, those that such a share would take are left
    out: tests that were written for what one sample found say nothing of the rest.
    """
    mutants: list[Mutant] = []
    num_places = {}
    for path in paths:
        source = path.read_text(encoding="utf-8")
        places = list(places_of(source))
        num_places[path] = len(places)
        taken = (mutant_at(place, path, source) for place in places if after <= place.lot < after + share)
        mutants += [mutant for mutant in taken if mutant is not None]
    return mutants, num_places


def unchanged(path: Path) -> Mutant:
    """The file as it is."""
    source = path.read_text(encoding="utf-8")
    return Mutant(path=path, line=1, statement=(1, 1), in_function=False, before="", after="", source=source)


def places_of(source: str) -> Iterator[Place]:
    """Everything in a file that an operator changes.

    Annotations, signatures, decorators, imports and assertions are left alone: most of such changes change no result.
    `zip(..., strict=True)` asserts that lengths are equal, and changes no result where they are.
    """
    left_alone = list(_left_alone(ast.parse(source)))
    tree, lines = parso.parse(source), source.splitlines()
    seen: Counter[tuple[str, str, int]] = Counter()
    for name, operator in operators().items():
        for occurrence, (start, _) in enumerate(_positions(tree, operator)):
            if any(first <= start < last for first, last in left_alone):
                continue
            text = lines[start[0] - 1]
            what = (name, text.strip(), start[1] - len(text) + len(text.lstrip()))
            digest = hashlib.sha256(repr((*what, seen[what])).encode()).hexdigest()
            seen[what] += 1
            yield Place(operator=operator, occurrence=occurrence, start=start, lot=int(digest[:16], 16) / 2**64)


def mutant_at(place: Place, path: Path, source: str) -> Mutant | None:
    """The changed file, or None where Python does not take it or it says the same."""
    changed = mutate_code(source, place.operator, place.occurrence)
    try:
        same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source))
    except SyntaxError:
        return None
    if same:
        return None
    before, after = source.splitlines(), changed.splitlines()
    line = place.start[0]
    tail = len(after) - len(before)  # what is changed may have stood on several lines
    around = list(_statements_around(line, ast.parse(source)))
    return Mutant(
        path=path,
        line=line,
        statement=min(((first, last) for first, last, _ in around), key=lambda lines: lines[1] - lines[0]),
        in_function=any(is_function for *_, is_function in around),
        before=" ".join(text.strip() for text in before[line - 1 : line + max(0, -tail)]),
        after=" ".join(text.strip() for text in after[line - 1 : line + max(0, tail)]),
        source=changed,
    )


def _positions(node: Any, operator: Operator) -> Iterator[Span]:
    """Where an operator applies, in the order in which `mutate_code` counts."""
    yield from operator.mutation_positions(node)
    for child in getattr(node, "children", ()):
        yield from _positions(child, operator)


def _left_alone(tree: ast.Module) -> Iterator[Span]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.lineno, node.col_offset), (node.body[0].lineno, 0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from map(_span, node.decorator_list)
        if isinstance(node, ast.AnnAssign):
            yield _span(node.annotation)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert):
            yield _span(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip":
            yield from (_span(one) for one in node.keywords if ast.unparse(one) == "strict=True")


def _span(node: Any) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _statements_around(line: int, tree: ast.Module) -> Iterator[tuple[int, int, bool]]:
    """Statements that a line is part of: first and last line (of a compound one's head), and whether it is a function.

    Of functions and classes around the line, which is in their bodies, all lines are given.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            body = getattr(node, "body", None)
            head = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            yield node.lineno, head if line <= head else node.end_lineno or node.lineno, is_function
