"""Compare the speed of two functions on a machine that does other work meanwhile. Needs no framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from time import process_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Times of a candidate over those of a baseline: median, first and third quartile of the ratios over all rounds."""

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
    """The CPU time of a candidate over that of a baseline, from pairs of calls in alternating order.

    Args:
        baseline: Called once per round.
        candidate: Called once per round.
        rounds: Number of pairs, at least 2.
        clock: By default CPU time of the process, of all its threads.
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
