"""Differences of tensors that cannot be compared element by element."""

from __future__ import annotations

import math

from traindiff.analyse.compare.case import Diagnosis
from traindiff.analyse.merge.distance import Pair, difference, is_transposed
from traindiff.core.summary import nonfinite_count, norm_of


def unlike(pair: Pair, *, broken: bool) -> Diagnosis | None:
    """What tells two tensors apart whose elements do not correspond; None if they do.

    Args:
        pair: Both sides.
        broken: Whether NaN and infinities are findings by themselves.
    """
    baseline, candidate = pair.baseline, pair.candidate
    if not (baseline.placed and candidate.placed):
        return _unplaced(pair)
    size = difference(pair)
    if is_transposed(pair) and not broken and size is not None and math.isfinite(size):
        norms = f"{norm_of(baseline.summary):.6g} in the baseline and {norm_of(candidate.summary):.6g}"
        message = f"One run holds it transposed, and the norms differ: {norms} in the candidate."
        return Diagnosis(kind="value", message=message)
    if baseline.shape != candidate.shape:
        message = f"The shape is {list(baseline.shape)} in the baseline and {list(candidate.shape)} in the candidate."
        return Diagnosis(kind="shape", message=message)
    if broken and size != math.inf:
        return Diagnosis(kind="non-finite", message=_non_finite_message(pair))
    return None


def _non_finite_message(pair: Pair) -> str:
    """A sentence about NaN and infinities at the same places in both runs."""
    count = int(nonfinite_count(pair.candidate.summary))
    of_all = f"{count} of {int(pair.candidate.summary['count'])} elements"
    return f"{of_all} {'is' if count == 1 else 'are'} NaN or infinite, at the same places in both runs."


def _unplaced(pair: Pair) -> Diagnosis:
    """The difference of a tensor whose rows, or whose elements, could not be brought together."""
    baseline, candidate = pair.baseline.summary, pair.candidate.summary
    of_rows = pair.baseline.key.phase in ("batch", "forward", "backward")
    its = "Over all micro-batches together, its" if of_rows else "Its"
    message = (
        f"{its} norm is {norm_of(baseline):.6g} in the baseline and "
        f"{norm_of(candidate):.6g} in the candidate, its sum {float(baseline['sum']):.6g} and "
        f"{float(candidate['sum']):.6g}."
    )
    return Diagnosis(kind="value", message=message)
