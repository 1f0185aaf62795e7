"""What is measured by benchmarks/faults.py: cases and what is said of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault or one legal variation, in one precision."""

    name: str
    precision: str
    model: str
    optimizer: str
    fault: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was said of a case.

    Attributes:
        case: The case.
        mode: `free`, `forced`, or `forced, in float32`.
        place: Of faults: step, phase and path where it is.
        verdict: The word; `refused` where the mode does not apply.
        said: Step, phase and path of the first divergence; empty where there is none.
        located: Whether that is where the fault is.
        ratio: Of the first divergence; of legal variations the largest one of any site.
        where: Site of that ratio.
        effect: Of faults: relative difference at the place of the fault, whatever its floor.
        right: Whether it is what ought to be said.
    """

    case: Case
    mode: str
    place: str
    verdict: str
    said: str
    located: bool
    ratio: float
    where: str
    effect: float
    right: bool
