"""The gradients with which an optimizer was called, and the sets of them that a training may treat apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from traindiff.merging.step_table import Entry, Key
from traindiff.observation import NO_GRADIENT
from traindiff.rounding import UNIT_ROUNDOFF
from traindiff.rules.rule import RunFacts
from traindiff.summary import nonfinite_count, norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradients with which an optimizer was called.

    Attributes:
        squares: Sum of squares by path.
        copied: Those of which several ranks hold copies.
        divided: Those of which several ranks hold a part each.
        ranks: How many ranks hold any.
        dimensions: Number of axes by path.
        contributed: Norm of what backward gave before anything was done to it; None where it is not known.
        tolerance: Relative error that a norm of them may have.
    """

    squares: Mapping[str, float]
    copied: frozenset[str]
    divided: frozenset[str]
    ranks: int
    dimensions: Mapping[str, int]
    contributed: float | None
    tolerance: float

    @property
    def norm(self) -> float:
        """L2 norm of all of them."""
        return math.sqrt(sum(self.squares.values()))

    @classmethod
    def of(cls, table: Mapping[Key, Entry], facts: RunFacts) -> Gradients | None:
        """The gradients of a step; None where they are not all known, or not all finite."""
        entries = {key.path: entry for key, entry in table.items() if key.phase == "grad" and not key.stage}
        unknown = [e for e in entries.values() if e.unobserved and not e.unobserved.startswith(NO_GRADIENT)]
        entries = {path: entry for path, entry in entries.items() if not entry.unobserved}
        if not facts.complete or unknown or not entries:
            return None
        if any(nonfinite_count(entry.summary) or not entry.exact or entry.apart for entry in entries.values()):
            return None
        shards = {path: {part.shard for part in entry.parts} for path, entry in entries.items()}
        u = max(UNIT_ROUNDOFF.get(entry.dtype, 0.0) for entry in entries.values())
        count = sum(int(entry.summary["count"]) for entry in entries.values())
        micro = [table.get(Key("grad", "micro", path, "grad", 0, 0)) for path in entries]
        known = all(one is not None and one.exact and not one.unobserved for one in micro)
        return cls(
            squares={path: float(entry.summary["sum_of_squares"]) for path, entry in entries.items()},
            copied=frozenset(path for path, entry in entries.items() if len(shards[path]) == 1 < len(entry.parts)),
            divided=frozenset(path for path, held in shards.items() if len(held) > 1),
            ranks=len({part.rank for entry in entries.values() for part in entry.parts}),
            dimensions={path: len(entry.shape) for path, entry in entries.items()},
            contributed=math.sqrt(sum(float(norm(e.summary)) ** 2 for e in micro if e is not None)) if known else None,
            # Short dtypes round the norm of each tensor, and of all of them; float32 may add up in any order.
            tolerance=4.0 * u if u > UNIT_ROUNDOFF["float32"] else max(64.0, math.sqrt(count)) * u,
        )


def set_of(gradients: Gradients, share: float) -> str:
    """The parameters whose gradients hold this share of all squares, in words; empty where none do, or several."""
    whole = sum(gradients.squares.values())
    near = 4.0 * gradients.tolerance
    found: dict[frozenset[str], str] = {}
    for words, paths in _sets(gradients):
        part = sum(gradients.squares[path] for path in paths) / whole
        if 10.0 * near < part and abs(part - share) <= near and len(paths) < len(gradients.squares):
            found.setdefault(paths, words)
    return next(iter(found.values())) if len(found) == 1 else ""


def counted_often(gradients: Gradients, excess: float) -> tuple[str, str] | None:
    """The parameters that account for so many more squares than there are, and how often they are counted."""
    for times in sorted({2, gradients.ranks} - {1}):
        if what := set_of(gradients, excess / (times - 1)):
            return what, "twice" if times == 2 else f"{times} times"
    return None


def _sets(gradients: Gradients) -> Iterable[tuple[str, frozenset[str]]]:
    """Sets of parameters that a training may treat apart, and what to call them."""
    by_name: dict[str, set[str]] = {}
    for path in gradients.squares:
        parts = path.split(".")
        yield path, frozenset({path})
        for depth in range(1, len(parts)):
            by_name.setdefault(f"{'.'.join(parts[:depth])}.*", set()).add(path)
            by_name.setdefault(f"*.{'.'.join(parts[depth:])}", set()).add(path)
    for least, words in (
        (1, "all parameters with one axis (biases, norms)"),
        (2, "all parameters with two axes or more"),
    ):
        alike = [path for path, axes in gradients.dimensions.items() if (axes > 1) == (least > 1)]
        yield words, frozenset(alike)
    yield "all parameters of which ranks hold copies", gradients.copied
    yield "all parameters that are divided over ranks", gradients.divided
    yield from ((f"all of {name}", frozenset(paths)) for name, paths in by_name.items() if len(paths) > 1)
