"""Constant factors in words: how large, and what they may mean."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction


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
    for one, says in known:
        if one and abs(factor / one - 1.0) < min(0.01, 0.1 * abs(one - 1.0)):  # near 1 every factor is near every other
            return f" ({says})"
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
