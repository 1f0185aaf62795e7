"""One difference that is to be diagnosed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from traindiff.analyse.findings import micro_steps_text
from traindiff.analyse.merge.step_table import Entry


def factor_text(value: float) -> str:
    """A factor with enough digits to tell it from 1."""
    return (
        f"{value:.4g}"
        if abs(value - 1.0) > 5e-4
        else f"(1 {value - 1.0:+.2g})".replace(" +", " + ").replace(" -", " - ")
    )


def factor_meaning(factor: float, micro_steps: int, ranks: int = 1, known: Iterable[tuple[float, str]] = ()) -> str:
    """A reading of a factor that is known, a small whole number or one over it; empty for any other.

    Args:
        factor: Candidate over baseline.
        micro_steps: Micro-batches in the candidate's step.
        ranks: Over how many ranks the batch is divided, in the run that has more of them.
        known: Factors of which something is known, and what to say of them.
    """
    for one, message in known:
        if one and abs(factor / one - 1.0) < min(0.01, 0.1 * abs(one - 1.0)):  # near 1 every factor is near every other
            return f" ({message})"
    size = abs(factor)
    whole = Fraction(size).limit_denominator(64) if math.isfinite(size) else Fraction(0)
    if size == 0 or (whole.numerator != 1 and whole.denominator != 1) or abs(float(whole) / size - 1) > 0.01:
        return ""
    if ranks == micro_steps > 1 and whole in (ranks, Fraction(1, ranks)):
        if whole == ranks:
            return f" (= world size {ranks} and its {ranks} micro-batches: summed over one of them, not averaged?)"
        return f" (= 1/{ranks}, one over the world size and over its micro-batches: divided once too often?)"
    if whole == ranks and ranks > 1:
        return f" (= world size {ranks}: summed over ranks instead of averaged?)"
    if whole == Fraction(1, ranks) and ranks > 1:
        return f" (= 1/{ranks}, one over the world size: averaged once too often?)"
    if whole == Fraction(1, micro_steps) and micro_steps > 1:
        return f" (= 1/{micro_steps}, one over its micro-batches: divided once too often?)"
    if whole == micro_steps and micro_steps > 1:
        return f" (= its {micro_steps} micro-batches: summed instead of averaged?)"
    return f" (= {whole})" if whole.denominator != 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A recognized shape: a word for it, what to say, and the numbers behind it."""

    kind: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything a test may look at.

    Attributes:
        baseline: The baseline's entry.
        candidate: The candidate's entry.
        contributions: What each micro-batch of the candidate brought to this gradient, by micro-step and rank, if
            recorded.
        micro_steps: How many micro-batches the candidate's step had.
        ranks: Over how many ranks the batch is divided, in the run that has more of them.
        difference: Relative L2 difference.
        floor: Its floor.
        previous: The baseline's summary in the step before, if it has one.
        factors: Factors of which something is known, and what to say of them.
    """

    baseline: Entry
    candidate: Entry
    contributions: Mapping[tuple[int, int], Any] = field(default_factory=dict)
    micro_steps: int = 1
    ranks: int = 1
    difference: float = 0.0
    floor: float = 0.0
    previous: Any = None
    factors: Sequence[tuple[float, str]] = ()


def lost_contribution(case: Case) -> Diagnosis | None:
    """A gradient that is not the sum of what its micro-batches brought: of all ranks, or of one."""
    by_step: dict[int, Any] = {}
    for (micro_step, _), one in case.contributions.items():
        by_step[micro_step] = by_step.get(micro_step, 0.0) + one["sketch"]
    sketches = {place: one["sketch"] for place, one in case.contributions.items()}
    if (found := _odd_terms(by_step, case.candidate)) is not None:
        odd, left_over = found
        said = _contributed([(f"micro-step {step}", factor) for step, factor in odd], len(by_step))
        first, rank = odd[0][0], None
    elif len(sketches) > len(by_step) and (found := _odd_terms(sketches, case.candidate)) is not None:
        odd, left_over = found
        (first, rank) = odd[0][0]
        names = [(f"rank {place[1]} in micro-step {place[0]}", factor) for place, factor in odd]
        said = _contributed(names, len(sketches))
    else:
        return None
    evidence = {"micro_step": first, "factor": odd[0][1], "residual": left_over}
    return Diagnosis(
        kind="lost-contribution",
        message=f"The optimizer's gradient {said}.",
        evidence=evidence if rank is None else {**evidence, "rank": rank},
    )


def _odd_terms(sketches: Mapping[Any, Any], sum_of_them: Entry) -> tuple[list[tuple[Any, float]], float] | None:
    """The terms that are not in a sum once, with how often they are, and what that does not explain; or None."""
    if len(sketches) < 2:
        return None
    columns = np.stack(list(sketches.values()), axis=1)
    target = sum_of_them.summary["sketch"]
    factors, *_ = np.linalg.lstsq(columns, target, rcond=None)
    size = float(np.linalg.norm(target))
    left_over = float(np.linalg.norm(columns @ factors - target)) / size if size else 0.0
    # Of two terms, either could be the odd one; they are relative to the global loss, so each should be there once.
    common = float(np.median(factors)) if len(factors) > 2 else 1.0
    if left_over > 1e-3 or abs(common) < 1e-12:
        return None
    relative = factors / common
    odd = [(term, float(value)) for term, value in zip(sketches, relative, strict=True) if abs(value - 1.0) > 0.05]
    return (odd, left_over) if odd and len(odd) <= len(sketches) // 2 else None


def _contributed(odd: Sequence[tuple[str, float]], num_terms: int) -> str:
    """What is odd about a gradient, from the factors with which some of its terms are in it."""
    lost = [name for name, factor in odd if abs(factor) < 0.02]
    rest = num_terms - len(odd)
    others = f"the other {rest} once" if rest > 1 else "the other one once"
    if len(lost) == len(odd):
        sum_of = f"it is the sum of the other {rest}" if rest > 1 else "it is that of the other one"
        return f"lacks what {_listed(lost)} of {num_terms} contributed; {sum_of}"
    held = [(name, factor) for name, factor in odd if name not in lost]
    parts = [f"holds what {name} of {num_terms} contributed {_times(value)}" for name, value in held]
    lacks = [f"lacks what {_listed(lost)} contributed"] if lost else []
    return f"{', '.join([*parts, *lacks])}; {others}"


def _listed(names: Sequence[str]) -> str:
    """`micro-step 0`, `micro-steps 0, 2 and 3`."""
    if len(names) == 1:
        return names[0]
    word = "micro-step "
    if all(name.startswith(word) for name in names):
        return micro_steps_text([int(name.removeprefix(word)) for name in names])
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _times(value: float) -> str:
    return "twice" if abs(value - 2.0) < 0.02 else f"{value:.3g} times"
