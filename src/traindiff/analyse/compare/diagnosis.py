"""What a difference looks like: each test reads two summaries and may recognize one shape."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from traindiff.analyse.compare.case import Case, Diagnosis, factor_meaning, factor_text, lost_contribution
from traindiff.analyse.merge.distance import best_fit
from traindiff.analyse.merge.step_table import Entry
from traindiff.core.shards import OPEN, Shard
from traindiff.core.summary import UNIT_ROUNDOFF, distance, finite_count, nonfinite_count, norm, number

ADDED = 0.01
"""What a sum of two gradients may leave unexplained: more than rounding does, less than another gradient would."""

LATE = 0.02
"""How near the step before must be, as a part of how far the step itself is, for a tensor to be one step late."""


def diagnose(case: Case) -> Diagnosis:
    """The first shape that fits, from the most to the least specific."""
    for test in TESTS:
        if (found := test(case)) is not None:
            return found
    size = f"{case.difference:.2g}"
    return Diagnosis(kind="value", message=f"The values differ by {size} of the baseline's size (relative L2).")


def late(case: Case) -> Diagnosis | None:
    """What the baseline had in the step before."""
    if case.previous is None or int(case.previous["count"]) != int(case.candidate.summary["count"]):
        return None
    size = float(norm(case.previous))
    apart = float(distance(case.previous, case.candidate.summary)) / size if size else math.inf
    if not apart <= LATE * min(case.difference, 1.0):
        return None
    return Diagnosis(
        kind="late",
        message="The candidate's is what the baseline has in the step before: one step late?",
        evidence={"difference_from_the_step_before": apart},
    )


def accumulated(case: Case) -> Diagnosis | None:
    """The gradient of the step before was not set to zero: two steps' gradients, added up."""
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
        message="The candidate's is the sum of the baseline's of this step and of the step before: was zero_grad() "
        "left out after that?",
        evidence={"residual": left_over},
    )


def nonfinite(case: Case) -> Diagnosis | None:
    """NaN or infinities where the other run has none, or others."""
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
    """An optimizer's own count of its steps."""
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
    """Indices and masks, of which neither size nor distance are known."""
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
    if any(abs(one - k) > 0.25 * abs(k) for one in moved):  # relu for gelu: one-sided, but not of one size
        return None
    return Diagnosis(kind="offset", message=f"Every element is about {k:+.4g} off.", evidence={"offset": k})


def localized(case: Case) -> Diagnosis | None:
    """One bucket of rows, or of columns, holds the whole difference."""
    for axis in ("row", "column"):
        baseline = np.sqrt(case.baseline.summary[f"{axis}_squares"])
        candidate = np.sqrt(case.candidate.summary[f"{axis}_squares"])
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


def _bucket(entry: Entry, axis: str, bucket: int) -> str:
    """The rows or columns of a bucket, as `traindiff.core.shards.Grid` divides them."""
    activation = entry.key.phase in ("batch", "forward", "backward")
    shape = (OPEN, *entry.shape[1:]) if activation else entry.shape
    grid = Shard.whole(shape).grid
    inner = entry.shape[1:] if activation else entry.shape
    if axis == "row":
        first, last, count = bucket * grid.row_block, (bucket + 1) * grid.row_block, inner[0] if inner else 1
    else:
        first, last, count = bucket * grid.column_block, (bucket + 1) * grid.column_block, grid.columns
    last = min(last, count) - 1
    where = f"{axis} {first}" if first == last else f"{axis}s {first} to {last}"
    if axis == "row":
        where += f" of axis {int(activation)}" if activation else ""
    return f"{where} (of {count})"


def precision(case: Case) -> Diagnosis | None:
    """As large as rounding to a shorter dtype would make it."""
    if case.baseline.dtype not in ("float32", "float64") or case.candidate.dtype != case.baseline.dtype:
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
"""In the order in which they are tried; each is independent of the others."""
