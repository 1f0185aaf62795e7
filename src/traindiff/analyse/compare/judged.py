"""What a comparison has judged so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from traindiff.analyse.align.gradients import GRADIENT_NORM
from traindiff.analyse.compare.verdict import DifferenceHistory, SiteDifference
from traindiff.analyse.merge.distance import Pair, difference, equal_bits
from traindiff.analyse.merge.step_table import Key
from traindiff.analyse.noise.tolerance import Tolerances


@dataclass(slots=True, kw_only=True)
class Judged:
    """What has been judged so far, over all steps.

    Attributes:
        tolerance: Used in place of floors where the user set one.
        differences: Largest difference of each site so far, in units of its floor.
        all_equal: Whether every pair so far held the same bits.
        previous: The baseline's summaries in the step before, by site.
        nan_in_both: Where both runs hold NaN at the same places.
        turned: Where a choice that rounding may turn picked another number of rows.
        absent: Paths of parameters that one run does not train, so that what follows needs no further word.
        history: Takes note of every difference, where a report is to show them.
    """

    tolerance: Tolerances | None = None
    differences: dict[Key, SiteDifference] = field(default_factory=dict)
    all_equal: bool = True
    previous: dict[Key, Any] = field(default_factory=dict)
    nan_in_both: list[str] = field(default_factory=list)
    turned: list[str] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)
    history: DifferenceHistory | None = None

    def floor(self, pair: Pair, floor: float) -> float:
        """The floor of a pair, or what the user's tolerances make of it."""
        counter = pair.baseline.key.slot == "step"
        chosen = None if self.tolerance is None or counter else self.tolerance.floor(pair)
        return floor if chosen is None else chosen

    @property
    def judges_parameters(self) -> bool:
        """Whether parameters themselves are judged after a step."""
        return self.tolerance is not None and self.tolerance.judges_parameters

    def size(self, pair: Pair) -> float | None:
        """How far a pair is apart; see `traindiff.analyse.merge.distance.difference`."""
        return math.inf if self.is_broken(pair) else difference(pair)

    def is_broken(self, pair: Pair) -> bool:
        """Whether there is NaN, or something infinite, where that is a difference in itself."""
        if self.tolerance is None or not self.tolerance.non_finite_fails:
            return False
        activation = pair.baseline.key.phase in ("forward", "backward")
        counts = ("nan",) if activation else ("nan", "positive_infinity", "negative_infinity")
        return any(int(entry.summary[name]) for entry in (pair.baseline, pair.candidate) for name in counts)

    def note(self, pair: Pair, step: int, size: float, floor: float) -> None:
        """Remember the largest difference of a site, and all of them where a report wants them."""
        if self.history is not None:
            self.history.note(pair, step, size, floor)
        key = pair.baseline.key
        equal = equal_bits(pair) or (size == 0.0 and not pair.baseline.exact)
        derived = key.phase == "update" or key == GRADIENT_NORM  # adds nothing to what it is derived from
        self.all_equal = self.all_equal and (equal or derived)
        row = SiteDifference(
            phase=key.phase, stage=key.stage, path=key.path, slot=key.slot, call=key.call, step=step,
            order=pair.baseline.order, difference=size, floor=floor, num_steps=0, num_identical_steps=0,
        )  # fmt: skip
        held = self.differences.get(key, row)
        worst = row if row.ratio > held.ratio else held
        self.differences[key] = replace(
            worst, num_steps=held.num_steps + 1, num_identical_steps=held.num_identical_steps + equal
        )
