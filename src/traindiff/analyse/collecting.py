"""How often Python looks for cycles while runs are compared or checked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 100_000
"""Objects after which the garbage collector looks for cycles, in place of 700: more than two steps of most trainings
have. Until then, what cycles hold stays."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Inside this context, Python looks for cycles less often: a step makes many objects, and no cycles."""
    before = gc.get_threshold()
    if 0 < before[0] < _NEW_OBJECTS:
        gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
