"""One summary as 64-bit words: where each field of `SUMMARY` begins, and how each word merges."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from traindiff.summary import SUMMARY

WORDS = SUMMARY.itemsize // 8
"""Words in a summary."""

ADD_INTEGERS, ADD_FLOATS, MINIMUM, MAXIMUM = range(4)
"""How a word merges."""

_MINIMA = ("minimum", "smallest")
_MAXIMA = ("maximum", "row_largest", "column_largest")


def first_word(name: str) -> int:
    """Index of the first word of a field."""
    assert SUMMARY.fields is not None
    return SUMMARY.fields[name][1] // 8


def merging() -> NDArray[np.int64]:
    """How each word merges, int64 of shape (WORDS,)."""
    ways = np.empty((), dtype=[(name, "<i8", SUMMARY[name].shape) for name in SUMMARY.names or ()])
    for name in SUMMARY.names or ():
        if name in _MINIMA:
            ways[name] = MINIMUM
        elif name in _MAXIMA:
            ways[name] = MAXIMUM
        else:
            ways[name] = ADD_FLOATS if SUMMARY[name].base.kind == "f" else ADD_INTEGERS
    return np.frombuffer(ways.tobytes(), dtype=np.int64)
