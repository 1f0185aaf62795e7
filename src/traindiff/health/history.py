"""What a check keeps of every site in every step, for a report that shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from traindiff.merging.history import History
from traindiff.merging.step_table import Entry, Key, scalar_entry
from traindiff.observation import ALL_GRADIENTS, SAMPLE
from traindiff.rounding import UNIT_ROUNDOFF
from traindiff.summary import largest, nonfinite_count, norm, number

FIELDS = ("order", "size", "largest", "zero", "nonfinite")
"""Numbers of a site in a step: what decides which step of a column is kept (the L2 norm, inf where not finite), the
norm (of a single element its value), the largest |x|, and the shares of zeros and of elements that are not finite."""


_NORM = Key("grad", "", ALL_GRADIENTS, "norm", 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extreme:
    """A site in the step in which its norm is largest, or in the first in which it is not finite.

    Attributes:
        step: That step.
        size: Its norm; inf where it is not finite.
        order: Place in execution order, in the first step that has the site.
        dtype: Of the tensor.
        shape: Of the tensor.
        summary: Of the tensor.
    """

    step: int
    size: float
    order: int
    dtype: str
    shape: tuple[int, ...]
    summary: Any


class RunHistory:
    """The sizes of all sites of a run in all steps, in bounded memory.

    Attributes:
        whole: By site.
        extremes: Each site where it is largest.
    """

    def __init__(self) -> None:
        self.whole: History[Key] = History(FIELDS)
        self.extremes: dict[Key, Extreme] = {}

    def note(self, table: Mapping[Key, Entry], step: int) -> None:
        """Remember what a step has: all that are no whole numbers, and the norm of all gradients.

        Args:
            table: Entries of the step.
            step: Its number.
        """
        gradients = [
            entry
            for key, entry in table.items()
            if key.phase == "grad" and key.slot == "grad" and not key.stage and not entry.unobserved
        ]
        if gradients:
            bad = any(nonfinite_count(entry.summary) for entry in gradients)
            size = math.nan if bad else math.sqrt(sum(float(entry.summary["sum_of_squares"]) for entry in gradients))
            order = max(entry.order for entry in gradients)
            self._site(_NORM, scalar_entry(_NORM, size, order=order), step)
        for key, entry in table.items():
            if not entry.unobserved and key.stage != SAMPLE and entry.dtype in UNIT_ROUNDOFF:
                self._site(key, entry, step)

    def _site(self, key: Key, entry: Entry, step: int) -> None:
        summary = entry.summary
        count = int(summary["count"])
        single = entry.shape == () and count == 1
        size = number(summary) if single else float(norm(summary))
        bad = int(nonfinite_count(summary))
        place = math.inf if bad or math.isnan(size) else abs(size)
        zero = int(summary["zero"]) / count if count else 0.0
        self.whole.note(key, step, (place, size, float(largest(summary)), zero, bad / count if count else 0.0))
        held = self.extremes.get(key)
        if held is None or place > held.size:
            self.extremes[key] = Extreme(
                step=step,
                size=place,
                order=held.order if held else entry.order,  # orders of one step compare, of several need not
                dtype=entry.dtype,
                shape=entry.shape,
                summary=np.array(summary)[()],  # a copy: a summary would keep its step's array in memory
            )
