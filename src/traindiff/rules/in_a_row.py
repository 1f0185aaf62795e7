"""What holds in several steps in a row, and for how many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True, kw_only=True)
class _Row(Generic[V]):
    value: V
    first: int
    num_steps: int = 0


class InARow(Generic[K, V]):
    """Keeps what holds in at least so many steps in a row. Steps that are not shown to it are passed over.

    Args:
        least: Steps in a row from which it is kept.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._running: dict[K, _Row[V]] = {}
        self._kept: dict[K, _Row[V]] = {}

    def see(self, found: Mapping[K, V], *, step: int) -> None:
        """Take note of a step, with the numbers of what holds in it."""
        for key in self._running.keys() - found.keys():
            del self._running[key]
        for key, value in found.items():
            row = self._running.setdefault(key, _Row(value=value, first=step))
            row.num_steps += 1
            if row.num_steps >= self._least:
                self._kept.setdefault(key, row)

    def __iter__(self) -> Iterator[tuple[K, V, int, int]]:
        """What was kept: what it is, its numbers in the first step, that step, and for how many it held."""
        return ((key, row.value, row.first, row.num_steps) for key, row in self._kept.items())
