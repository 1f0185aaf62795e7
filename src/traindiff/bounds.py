"""Bounds of the intervals in which the elements of gradients are counted, as the user wrote them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from traindiff.errors import Problem


def checked_bounds(
    value: object, problems: list[Problem], *, where: str, write: str = "bounds={}"
) -> tuple[float, ...]:
    """The bounds as numbers; appends to `problems` where they are none.

    Args:
        value: What the user wrote.
        problems: What is wrong so far.
        where: Where it was written; `{!r}` is the value.
        write: How to write it there; `{}` is what.
    """
    found: list[Any] = list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else [value]
    place = where.format(value)
    if not all(_is_number(bound) for bound in found):
        problems.append(
            Problem(
                where=place,
                what="must be a list of finite numbers.",
                fix=f"Write {write.format([-1, 0, 1])}, or leave it out.",
            )
        )
        return ()
    if any(following <= bound for bound, following in pairwise(found)):
        ascending = sorted({*found})
        problems.append(
            Problem(where=place, what="must ascend, each number once.", fix=f"Write {write.format(ascending)}.")
        )
        return ()
    return tuple(found)  # as they were written: a file may name its columns after them


def interval_names(bounds: Iterable[float]) -> list[str]:
    """`(-inf, -1]`, `(-1, 0]`, ..., `(1, inf)`: what the intervals are called. None without bounds."""
    texts = [str(bound) for bound in bounds]
    if not texts:
        return []
    inner = [f"({first}, {last}]" for first, last in pairwise(texts)]
    return [f"(-inf, {texts[0]}]", *inner, f"({texts[-1]}, inf)"]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
