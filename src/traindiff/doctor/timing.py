"""How much longer one thing takes than another, on a machine that does other work too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from time import process_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Times of a candidate over those of a baseline, round by round.

    Attributes:
        median: Of the ratios.
        low: Their first quartile.
        high: Their third quartile.
        rounds: How many there were.
        baseline_seconds: Median time of the baseline.
    """

    median: float
    low: float
    high: float
    rounds: int
    baseline_seconds: float


def interleaved(
    baseline: Callable[[], object],
    candidate: Callable[[], object],
    *,
    rounds: int,
    clock: Callable[[], float] = process_time,
) -> Ratio:
    """Time both in turns, the order swapped each round, so that what else the machine does hits both.

    Args:
        baseline: What the other is held against. Called once per round.
        candidate: Called once per round.
        rounds: At least 2.
        clock: CPU time of the process (of all its threads) where left out.
    """
    ratios: list[float] = []
    plain: list[float] = []
    for number in range(rounds):
        order = (baseline, candidate) if number % 2 == 0 else (candidate, baseline)
        seconds: dict[Callable[[], object], float] = {}
        for run in order:
            before = clock()
            run()
            seconds[run] = clock() - before
        plain.append(seconds[baseline])
        ratios.append(seconds[candidate] / max(seconds[baseline], 1e-9))
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return Ratio(median=median(ratios), low=low, high=high, rounds=rounds, baseline_seconds=median(plain))
