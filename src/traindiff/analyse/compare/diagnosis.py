"""The shape of a difference: each test reads two summaries and may recognize one shape."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from traindiff.analyse.compare.case import Case, Diagnosis
from traindiff.analyse.compare.factors import factor_meaning
from traindiff.analyse.compare.gradient_sums import accumulated, late, lost_contribution, lost_state
from traindiff.analyse.findings import Finding, factor_text
from traindiff.analyse.merge.distance import Pair, best_fit, rounded_to
from traindiff.analyse.merge.site import MergedSite
from traindiff.analyse.noise.lost import num_lost_rows
from traindiff.core.shards import BUCKETS, OPEN, Shard
from traindiff.core.summary import SKETCH_SIZE, UNIT_ROUNDOFF, distance, finite_count, nonfinite_count, norm_of, number


def diagnose(case: Case) -> Diagnosis:
    """The first shape that fits, from the most to the least specific."""
    for test in TESTS:
        if (found := test(case)) is not None:
            return found
    size = f"{case.difference:.2g}"
    return Diagnosis(kind="value", message=f"The values differ by {size} of the baseline's size (relative L2).")


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
    lost = "Was its state lost, or not loaded, at a resume?"
    goes_on = "Does the candidate continue a training from a checkpoint? Then say at which step, with --offset."
    return Diagnosis(
        kind="step-count",
        message=f"The candidate's optimizer is at its step {after:g} for this parameter, the baseline's at its step "
        f"{before:g}. {lost if after < before else goes_on}",
        evidence={"baseline": before, "candidate": after},
    )


def whole_numbers(case: Case) -> Diagnosis | None:
    """Indices and masks, which have neither size nor distance."""
    if case.baseline.dtype in UNIT_ROUNDOFF or case.candidate.dtype in UNIT_ROUNDOFF:
        return None
    return permuted(case) or Diagnosis(kind="value", message="Whole numbers (indices, a mask) differ.")


def vanished(case: Case) -> Diagnosis | None:
    """All zero on one side only."""
    if norm_of(case.candidate.summary) == 0.0:
        if case.candidate.key.phase == "update":
            message = "The candidate's step did not change this parameter; the baseline's did."
            return Diagnosis(kind="never-updated", message=message)
        return Diagnosis(kind="zero", message="The candidate's is all zero; the baseline's is not.")
    if norm_of(case.baseline.summary) == 0.0:
        return Diagnosis(kind="zero", message="The baseline's is all zero; the candidate's is not.")
    return None


def permuted(case: Case) -> Diagnosis | None:
    """The same values in another order."""
    baseline, candidate = case.baseline, case.candidate
    known = baseline.exact and candidate.exact and baseline.dtype == candidate.dtype
    known = known and baseline.factor == candidate.factor  # which the stored bits contain
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
        message=f"The candidate's is {factor_text(s, left_over)} x the baseline's{meaning}.",
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
            lost = zeros(case)
            more = f" {lost.message}" if lost is not None and _LARGE in lost.message else ""
            return Diagnosis(
                kind="localized",
                message=f"The difference is in {_bucket(case.baseline, axis, worst)} only.{more}",
                evidence={"axis": axis, "bucket": worst, **(lost.evidence if lost is not None and more else {})},
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


def precision(case: Case) -> Diagnosis | None:
    """A difference that looks like rounding to a shorter dtype, by its size and as it has no direction."""
    dtype = rounded_to(Pair(baseline=case.baseline, candidate=case.candidate))
    if not dtype:
        return None
    return Diagnosis(
        kind="precision",
        message=f"The difference, {case.difference:.2g} of the baseline's size, is as small as rounding to "
        f"{dtype} would make it: a shorter dtype inside, or an approximation?",
        evidence={"dtype": dtype},
    )


_GUESS = re.compile(
    r"The difference, (\S+) of the baseline's size, is as small as rounding to \w+ would make it: a shorter dtype "
    r"inside, or an approximation\?"
)


def without_guess(finding: Finding) -> Finding:
    """The finding without the guess that something is rounded, where another cause is known."""
    if finding.kind != "precision":
        return finding
    message = _GUESS.sub(r"The values differ by \1 of the baseline's size (relative L2).", finding.message)
    return replace(finding, kind="value", message=message)


_FEWEST_ZEROS, _FEWEST_OF_ROWS, _FEWEST_OF_WEIGHTS = 16, 4, 8
"""Fewer zeros more or less are nothing to speak of; whole rows may be shorter: of a batch, of a weight's gradient."""


_LARGE = "The difference is about as large as that makes it."


def _lines(case: Case, zero: int) -> str:
    """`, as many as 3 of its 6 rows hold`; a matrix may have lost columns as well."""
    shape, count = case.baseline.shape, int(finite_count(case.baseline.summary))
    lines = [("rows", shape[0])] if shape else []
    lines += [("columns", shape[1])] if len(shape) == 2 else []
    found = [
        f"{zero * length // count} of its {length} {name}"
        for name, length in lines
        if count and length and count % length == 0 and zero % (count // length) == 0
    ]
    return f", as many as {' or '.join(found)} hold" if found else ""


def zeros(case: Case) -> Diagnosis | None:
    """Many more elements that are exactly zero in one run.

    Two masks that are drawn with the same probability differ by a few times the root of the number of elements.
    """
    sides = (case.baseline.summary, case.candidate.summary)
    count = int(finite_count(sides[0]))
    before, after = (int(one["zero"]) for one in sides)
    more, run, other = (after - before, "candidate", "baseline") if after > before else (
        before - after, "baseline", "candidate"
    )  # fmt: skip
    sizes = [float(one["sum_of_squares"]) for one in (sides if after > before else sides[::-1])]
    apart = float(distance(*sides)) ** 2
    evidence = {"baseline_zeros": before, "candidate_zeros": after}
    rows_of = case.baseline.shape[0] if case.baseline.shape else 0
    each = count // rows_of if rows_of else 0
    whole = bool(each) and more % each == 0
    # Setting elements to zero takes their squares out of the sum; the sketch estimates them to a factor of 2 (4 sigma).
    lost = (sizes[0] - sizes[1]) / apart if apart else 0.0
    exact = case.baseline.exact and case.candidate.exact
    of_rows = _FEWEST_OF_ROWS if case.baseline.batched else _FEWEST_OF_WEIGHTS
    few = more < (of_rows if whole else _FEWEST_ZEROS)
    # The sketch of few elements is nearly exact.
    small = whole and case.baseline.batched and count <= SKETCH_SIZE and 0.9 < lost < 1.1
    if exact and 0.5 < lost < 2.0 and (small or not few):
        message = (
            f"{more} of {count} elements are zero in the {run} and not in the {other}{_lines(case, more)}. {_LARGE}"
        )
        return Diagnosis(kind="zeros", message=message, evidence=evidence)
    if case.baseline.key.phase == "grad" and num_lost_rows(Pair(baseline=case.baseline, candidate=case.candidate)):
        message = f"{more} of {count} elements are zero in the {run} and not in the {other}{_lines(case, more)}."
        return Diagnosis(kind="zeros", message=message, evidence=evidence)
    if more < max(_FEWEST_ZEROS, 4.0 * math.sqrt(count)):
        return None
    message = f"{before} of {count} elements are zero in the baseline, and {after} in the candidate"
    asked = ": was a mask, dropout or a gate left out, or added?" if case.baseline.key.phase == "forward" else "."
    message += asked  # a gradient has zeros for many more reasons: labels, rows that are not used, what is tied
    return Diagnosis(kind="zeros", message=message, evidence=evidence)


TESTS: tuple[Callable[[Case], Diagnosis | None], ...] = (
    nonfinite,
    counted,
    whole_numbers,
    vanished,
    late,
    accumulated,
    lost_state,
    lost_contribution,
    permuted,
    scaled,
    shifted,
    localized,
    zeros,
    precision,
)
"""The tests in the order in which they are tried; each is independent of the others."""
