"""The batch that a module works on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch that the root module is working on.

    Attributes:
        size: Samples in it: the length of the root input's batch axis.
        lengths: Lengths of axis 0 that mean "one entry (or several) per sample": `size`, and its
            products with the axes that follow it in the root's inputs, e.g. batch x sequence.
    """

    size: int
    lengths: frozenset[int]
