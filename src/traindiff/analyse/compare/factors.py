"""Factors: one between two tensors, or one for each micro-batch of a gradient; and how to say them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.findings import micro_steps_text
from traindiff.analyse.merge.site import MergedSite
from traindiff.analyse.noise.gradients import median
from traindiff.core.summary import UNIT_ROUNDOFF


def factor_meaning(factor: float, micro_steps: int, ranks: int = 1, known: Iterable[tuple[float, str]] = ()) -> str:
    """The meaning of a known factor, a small whole number or the inverse of one; empty for any other.

    Args:
        factor: Candidate over baseline.
        micro_steps: Micro-batches in the candidate's step.
        ranks: Number of ranks that share the batch, in the run that has more of them.
        known: Known factors, with what to say about each.
    """
    for one, message in known:
        if one and abs(factor / one - 1.0) < min(
            0.01, 0.1 * abs(one - 1.0)
        ):  # all factors near 1 are close to each other
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


def clipping_left_out(baseline: float, candidate: float, *, common: float) -> list[tuple[float, str]]:
    """Factors between gradients of which one run clips all, and the other all but a few; with what to say about each.

    Args:
        baseline: Factor that the baseline's clipping applied.
        candidate: Factor that the candidate's applied.
        common: Factor between most gradients, which is divided out.
    """
    if not 0.0 < baseline < 1.0 or not 0.0 < candidate < 1.0:
        return []
    return [
        (1.0 / baseline / common, f"= 1/{baseline:.4g}, as if the candidate's clipping left it out"),
        (candidate / common, f"= {candidate:.4g}, as if the baseline's clipping left it out"),
    ]


def odd_terms(sketches: Mapping[Any, Any], sum_of_them: MergedSite) -> tuple[list[tuple[Any, float]], float] | None:
    """Terms that a sum does not hold exactly once, with their factors, and the remainder; or None."""
    if len(sketches) < 2:
        return None
    columns = np.stack(list(sketches.values()), axis=1)
    target = sum_of_them.summary["sketch"]
    factors, *_ = np.linalg.lstsq(columns, target, rcond=None)
    size = float(np.linalg.norm(target))
    left_over = float(np.linalg.norm(columns @ factors - target)) / size if size else 0.0
    common = _common(factors)
    unit = UNIT_ROUNDOFF.get(sum_of_them.dtype, 0.0)  # each addition may round by one
    if left_over > max(1e-3, unit * math.sqrt(len(sketches))) or abs(common) < 1e-12:
        return None
    relative = factors / common
    odd = [(term, float(value)) for term, value in zip(sketches, relative, strict=True) if abs(value - 1.0) > 0.05]
    return (odd, left_over) if odd and len(odd) <= len(sketches) // 2 else None


def _common(factors: NDArray[np.float64]) -> float:
    """The factor that clipping or averaging gives to every term: the median, or of two terms the one that is not lost.

    Of two terms that are both there, either could be the odd one, and each should have the factor 1.
    """
    if len(factors) > 2:
        return median(factors.tolist())
    small, large = sorted(map(float, factors), key=abs)
    return large if abs(small) < LOST * abs(large) else 1.0


LOST = 0.02
"""A term with a smaller share of the common factor is lost."""


def contributed(odd: Sequence[tuple[str, float]], num_terms: int, *, whose: str = "", each_rank: bool = False) -> str:
    """Words about the odd terms of a gradient, from their factors.

    Args:
        odd: Names and factors of the odd terms.
        num_terms: Number of all terms.
        whose: Whose terms they are, if not the gradient's own; ends with a space.
        each_rank: True if each rank's contribution to a micro-step is a term.
    """
    among = "" if each_rank else f" of {whose}{num_terms}"
    counted = f" of {whose}{num_terms} contributions of all ranks" if each_rank else ""
    lost = [name for name, factor in odd if abs(factor) < LOST]
    rest = num_terms - len(odd)
    others = f"the other {rest}{counted} once" if rest > 1 else f"the other one{counted} once"
    if len(lost) == len(odd):
        sum_of = f"it is the sum of the other {rest}{counted}" if rest > 1 else f"it is that of the other one{counted}"
        return f"lacks what {_listed(lost)}{among} contributed; {sum_of}"
    held = [(name, factor) for name, factor in odd if name not in lost]
    parts = [f"holds what {name}{among} contributed {_times(value)}" for name, value in held]
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
