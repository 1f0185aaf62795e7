"""What a number usually is: its median over the last steps, and how far it is usually from it."""

from __future__ import annotations

from collections import deque
from statistics import median

SPREAD = 1.4826
"""Turns the median distance from the median into a standard deviation, where numbers are normally distributed."""


class Trailing:
    """The last numbers of a series.

    Args:
        window: How many.
    """

    def __init__(self, window: int) -> None:
        self._numbers: deque[float] = deque(maxlen=window)

    def add(self, value: float) -> None:
        """The next number."""
        self._numbers.append(value)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def median(self) -> float:
        """Of the last numbers; there must be one."""
        return median(self._numbers)

    @property
    def spread(self) -> float:
        """Their deviation from the median, which no few outliers change."""
        middle = self.median
        return SPREAD * median(abs(value - middle) for value in self._numbers)
