"""The shape of a difference: each test reads two summaries and may recognize one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from traindiff.analyse.compare.factors import contributed, factor_meaning, factor_text, odd_terms
from traindiff.analyse.merge.distance import best_fit
from traindiff.analyse.merge.site import MergedSite
from traindiff.core.shards import BUCKETS, OPEN, Shard
from traindiff.core.summary import UNIT_ROUNDOFF, distance, finite_count, nonfinite_count, norm, number


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A recognized shape: its kind, a message, and the numbers behind it."""

    kind: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One difference, with everything that a test may look at.

    Attributes:
        baseline: The baseline's entry.
        candidate: The candidate's entry.
        contributions: Gradient of each micro-batch of the candidate, by micro-step and rank, if recorded.
        micro_steps: Number of micro-batches in the candidate's step.
        ranks: Number of ranks that share the batch, in the run that has more of them.
        difference: Relative L2 difference.
        floor: Its floor.
        previous: The baseline's summary in the step before, or in the evaluation of the loss before, if it has one.
        unit: The name of what lies before: `step` or `evaluation`.
        factors: Known factors, with what to say about each.
    """

    baseline: MergedSite
    candidate: MergedSite
    contributions: Mapping[tuple[int, int], Any] = field(default_factory=dict)
    micro_steps: int = 1
    ranks: int = 1
    difference: float = 0.0
    floor: float = 0.0
    previous: Any = None
    unit: str = "step"
    factors: Sequence[tuple[float, str]] = ()


ADDED = 0.01
"""Remainder that a sum of two gradients may leave: more than rounding, less than another gradient."""

LATE = 0.02
"""A tensor is one step late if its difference from the step before is at most this part of its difference."""


def diagnose(case: Case) -> Diagnosis:
    """The first shape that fits, from the most to the least specific."""
    for test in TESTS:
        if (found := test(case)) is not None:
            return found
    size = f"{case.difference:.2g}"
    return Diagnosis(kind="value", message=f"The values differ by {size} of the baseline's size (relative L2).")


def late(case: Case) -> Diagnosis | None:
    """The baseline's tensor of the step before."""
    if case.previous is None or int(case.previous["count"]) != int(case.candidate.summary["count"]):
        return None
    size = float(norm(case.previous))
    apart = float(distance(case.previous, case.candidate.summary)) / size if size else math.inf
    if not apart <= LATE * min(case.difference, 1.0):
        return None
    return Diagnosis(
        kind="late",
        message=f"The candidate's is what the baseline has in the {case.unit} before: one {case.unit} late?",
        evidence={"difference_from_the_step_before": apart},
    )


def accumulated(case: Case) -> Diagnosis | None:
    """The sum of two steps' gradients: zero_grad() was left out."""
    if case.previous is None or (case.baseline.key.phase, case.baseline.key.slot) != ("grad", "grad"):
        return None
    before, own, both = case.previous["sketch"], case.baseline.summary["sketch"], case.candidate.summary["sketch"]
    size, added = float(np.linalg.norm(both)), float(np.linalg.norm(before))
    if case.baseline.shape != case.candidate.shape or not size or added < 0.05 * size:
        return None
    left_over = float(np.linalg.norm(both - own - before)) / size
    if not left_over <= ADDED:
        return None
    return Diagnosis(
        kind="accumulated",
        message=f"The candidate's is the sum of the baseline's of this {case.unit} and of the {case.unit} before: was "
        "zero_grad() left out after that?",
        evidence={"residual": left_over},
    )


def nonfinite(case: Case) -> Diagnosis | None:
    """NaN or infinities that the other run does not have, or has elsewhere."""
    baseline, candidate = case.baseline.summary, case.candidate.summary
    counts = [
        (int(baseline[name]), int(candidate[name]), words)
        for name, words in (("nan", "NaN"), ("positive_infinity", "+inf"), ("negative_infinity", "-inf"))
    ]
    differing = [entry for entry in counts if entry[0] != entry[1]]
    if not differing:
        if nonfinite_count(baseline) and baseline["nonfinite"] != candidate["nonfinite"]:
            return Diagnosis(kind="non-finite", message="NaN or infinities stand at other places than in the baseline.")
        return None
    message = ", ".join(f"{there} {words} where the baseline has {here}" for here, there, words in differing)
    evidence = {words: there for _, there, words in counts}
    return Diagnosis(
        kind="non-finite",
        message=f"The candidate holds {message}, of {int(candidate['count'])} elements.",
        evidence=evidence,
    )


def counted(case: Case) -> Diagnosis | None:
    """An optimizer's own step count."""
    if case.baseline.key.phase != "optimizer" or case.baseline.key.slot != "step":
        return None
    before, after = (number(entry.summary) for entry in (case.baseline, case.candidate))
    return Diagnosis(
        kind="step-count",
        message=f"The candidate's optimizer is at its step {after:g} for this parameter, the baseline's at its step "
        f"{before:g}. Was its state lost, or not loaded, at a resume?",
        evidence={"baseline": before, "candidate": after},
    )


def whole_numbers(case: Case) -> Diagnosis | None:
    """Indices and masks, which have neither size nor distance."""
    if case.baseline.dtype in UNIT_ROUNDOFF or case.candidate.dtype in UNIT_ROUNDOFF:
        return None
    return permuted(case) or Diagnosis(kind="value", message="Whole numbers (indices, a mask) differ.")


def vanished(case: Case) -> Diagnosis | None:
    """All zero on one side only."""
    if float(norm(case.candidate.summary)) == 0.0:
        if case.candidate.key.phase == "update":
            message = "The candidate's step did not change this parameter; the baseline's did."
            return Diagnosis(kind="never-updated", message=message)
        return Diagnosis(kind="zero", message="The candidate's is all zero; the baseline's is not.")
    if float(norm(case.baseline.summary)) == 0.0:
        return Diagnosis(kind="zero", message="The baseline's is all zero; the candidate's is not.")
    return None


def permuted(case: Case) -> Diagnosis | None:
    """The same values in another order."""
    baseline, candidate = case.baseline, case.candidate
    known = baseline.exact and candidate.exact and baseline.dtype == candidate.dtype
    if known and baseline.summary["multiset"] == candidate.summary["multiset"]:
        return Diagnosis(kind="permuted", message="The candidate holds the same values in another order.")
    return None


def scaled(case: Case) -> Diagnosis | None:
    """A constant factor."""
    s, left_over = best_fit(case.baseline, case.candidate)
    if s == 0.0 or not math.isfinite(s) or abs(s - 1.0) < 3 * max(left_over, case.floor) or left_over > 0.02:
        return None
    if abs(s + 1.0) < 0.02:
        return Diagnosis(
            kind="sign",
            message="The candidate's is the baseline's with the sign flipped.",
            evidence={"factor": s},
        )
    meaning = factor_meaning(s, case.micro_steps, case.ranks, case.factors)
    return Diagnosis(
        kind="scale",
        message=f"The candidate's is {factor_text(s)} x the baseline's{meaning}.",
        evidence={"factor": s, "residual": left_over},
    )


def shifted(case: Case) -> Diagnosis | None:
    """A constant added to every element."""
    baseline, candidate = case.baseline.summary, case.candidate.summary
    count = int(finite_count(baseline))
    total = float(candidate["sum"] - baseline["sum"])
    size = float(distance(baseline, candidate))
    # A constant k over n elements has sum n k and norm sqrt(n) |k|; the sketch is good to about 9 %.
    if count < 16 or size == 0.0 or not 0.75 < abs(total) / (math.sqrt(count) * size) < 1.35:
        return None
    k = total / count
    moved = [float(candidate[name] - baseline[name]) for name in ("minimum", "maximum")]
    if any(abs(one - k) > 0.25 * abs(k) for one in moved):  # e.g. relu for gelu: one-sided, but not constant
        return None
    return Diagnosis(kind="offset", message=f"Every element is about {k:+.4g} off.", evidence={"offset": k})


def localized(case: Case) -> Diagnosis | None:
    """One bucket of rows, or of columns, holds the whole difference."""
    for axis in ("row", "column"):
        baseline, candidate = _profile(case.baseline, axis), _profile(case.candidate, axis)
        used = (baseline > 0) | (candidate > 0)
        if used.sum() < 4:
            continue
        change = np.abs(candidate - baseline)
        worst = int(np.argmax(change))
        rest = np.delete(change, worst)
        if change[worst] > 20 * float(rest.max(initial=0.0)) and change[worst] > 4 * case.floor * baseline.max():
            return Diagnosis(
                kind="localized",
                message=f"The difference is in {_bucket(case.baseline, axis, worst)} only.",
                evidence={"axis": axis, "bucket": worst},
            )
    return None


def _profile(entry: MergedSite, axis: str) -> Any:
    """Norms of the buckets of rows or columns; nothing if a bucket holds other rows in each sample."""
    squares = entry.summary[f"{axis}_squares"]
    if axis == "row" and entry.batched:
        rows = entry.shape[1] if len(entry.shape) > 2 else 1
        if not rows or (rows % BUCKETS and BUCKETS % rows):
            return np.zeros(0)
        squares = squares.reshape(-1, min(rows, BUCKETS)).sum(0)
    return np.sqrt(squares)


def _bucket(entry: MergedSite, axis: str, bucket: int) -> str:
    """The rows or columns of a bucket, as `traindiff.core.shards.Grid` divides them."""
    grid = Shard.whole((OPEN, *entry.shape[1:]) if entry.batched else entry.shape).grid
    inner = entry.shape[1:] if entry.batched else entry.shape
    if axis == "row":
        first, last, count = bucket * grid.row_block, (bucket + 1) * grid.row_block, inner[0] if inner else 1
    else:
        first, last, count = bucket * grid.column_block, (bucket + 1) * grid.column_block, grid.columns
    last = min(last, count) - 1
    where = f"{axis} {first}" if first == last else f"{axis}s {first} to {last}"
    if axis == "row":
        where += f" of axis {int(entry.batched)}" if entry.batched else ""
    return f"{where} (of {count})"


_ROUNDED_ELEMENTS = 64
"""With fewer elements, rounding cannot be told from other differences of its size."""


def precision(case: Case) -> Diagnosis | None:
    """A difference that looks like rounding to a shorter dtype, by its size and as it has no direction.

    Rounding errors are independent and as often up as down: they add up to no more than a few of their norms, and no
    multiple of the baseline explains a part of them. A wrong eps or a kernel's coherent error may have the same size.
    """
    if case.baseline.dtype not in ("float32", "float64") or case.candidate.dtype != case.baseline.dtype:
        return None
    baseline, candidate = case.baseline.summary, case.candidate.summary
    moved, apart = abs(float(candidate["sum"] - baseline["sum"])), float(distance(baseline, candidate))
    _, left_over = best_fit(case.baseline, case.candidate)
    if int(finite_count(baseline)) < _ROUNDED_ELEMENTS or moved > 4.0 * apart or left_over < 0.8 * case.difference:
        return None
    for dtype in ("bfloat16", "float16"):
        u = UNIT_ROUNDOFF[dtype]
        if 0.15 * u < case.difference < 1.2 * u:
            return Diagnosis(
                kind="precision",
                message=f"The difference, {case.difference:.2g} of the baseline's size, is as small as rounding to "
                f"{dtype} would make it: a shorter dtype inside, or an approximation?",
                evidence={"dtype": dtype},
            )
    return None


def lost_contribution(case: Case) -> Diagnosis | None:
    """A gradient that is not the sum of its micro-batches' gradients: of all ranks, or of one."""
    by_step: dict[int, Any] = {}
    for (micro_step, _), one in case.contributions.items():
        by_step[micro_step] = by_step.get(micro_step, 0.0) + one["sketch"]
    sketches = {place: one["sketch"] for place, one in case.contributions.items()}
    if (found := odd_terms(by_step, case.candidate)) is not None:
        odd, left_over = found
        said = contributed([(f"micro-step {step}", factor) for step, factor in odd], len(by_step))
        first, rank = odd[0][0], None
    elif len(sketches) > len(by_step) and (found := odd_terms(sketches, case.candidate)) is not None:
        odd, left_over = found
        (first, rank) = odd[0][0]
        names = [(f"rank {place[1]} in micro-step {place[0]}", factor) for place, factor in odd]
        said = contributed(names, len(sketches))
    else:
        return None
    evidence = {"micro_step": first, "factor": odd[0][1], "residual": left_over}
    return Diagnosis(
        kind="lost-contribution",
        message=f"The optimizer's gradient {said}.",
        evidence=evidence if rank is None else {**evidence, "rank": rank},
    )


TESTS: tuple[Callable[[Case], Diagnosis | None], ...] = (
    nonfinite,
    counted,
    whole_numbers,
    vanished,
    late,
    accumulated,
    lost_contribution,
    permuted,
    scaled,
    shifted,
    localized,
    precision,
)
"""The tests in the order in which they are tried; each is independent of the others."""
