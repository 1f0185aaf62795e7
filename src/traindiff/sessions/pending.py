"""Observations of the steps that are not finished, until they are written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from traindiff.observation import Observation
from traindiff.summary import SUMMARY, Summaries, empty

_NOTHING = empty()


class Pending:
    """Holds observations by the optimizer and step that they belong to, in order of arrival."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], list[tuple[Observation, Any]]] = {}

    def append(self, seen: Observation, summary: Any) -> None:
        """Keep one observation; `summary` is None for an unobserved site."""
        rows = self._rows.setdefault((seen.optimizer, seen.step), [])
        rows.append((seen, _NOTHING if summary is None else summary))

    def clear(self) -> None:
        """Drop everything."""
        self._rows.clear()

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def take(self, optimizer: str | None = None) -> Iterator[tuple[list[Observation], Summaries]]:
        """Remove and yield what belongs to one optimizer, or to all of them: one item per step."""
        for key in sorted(key for key in self._rows if optimizer in (None, key[0])):
            rows = self._rows.pop(key)
            yield [seen for seen, _ in rows], np.array([summary for _, summary in rows], dtype=SUMMARY)
