"""Differences in bits: the first one of two runs, and why any bit may count."""

from __future__ import annotations

import math
from collections.abc import Collection

from traindiff.analyse.findings import Finding, ranks_text
from traindiff.analyse.merge.distance import Pair, difference, differing_ranks
from traindiff.analyse.merge.site import SiteKey, finding_at, only_rank
from traindiff.core.site import label
from traindiff.core.summary import number

KIND = "bits"
"""Kind of a finding at a site whose bits differ."""

ASKED = "Any bit that differs counts, because identical results were asked for."
"""Why any bit is a finding, if the user demands the same bits."""


def bit_difference(pair: Pair, step: int, *, micro_steps: int) -> Finding:
    """A finding at a pair whose bits differ. Its floor is 0: in bits, no difference is small.

    Args:
        pair: The pair.
        step: The step.
        micro_steps: Micro-batches in the candidate's step.
    """
    baseline, candidate = pair.baseline, pair.candidate
    size, count = difference(pair), int(baseline.summary["count"])
    apart = differing_ranks(pair, 0.0)
    rank = only_rank(candidate) if len(apart) != 1 else apart[0]
    aside = f" Only what {ranks_text(apart, capital=False)} holds differs." if apart else ""
    micro_step = 0 if micro_steps == 1 else baseline.key.micro_step or None
    return finding_at(
        baseline, step=step, kind=KIND, message=_message(pair, size) + aside, rank=rank, micro_step=micro_step,
        difference=math.inf if size is None else size,
        evidence={"dtype": baseline.dtype, "shape": list(baseline.shape), "elements": count},
    )  # fmt: skip


def _message(pair: Pair, size: float | None) -> str:
    baseline, candidate = pair.baseline, pair.candidate
    if baseline.dtype != candidate.dtype:
        return f"The dtype is {baseline.dtype} in the baseline and {candidate.dtype} in the candidate."
    if baseline.shape != candidate.shape:
        shapes = f"{list(baseline.shape)} in the baseline and {list(candidate.shape)} in the candidate"
        return f"The shape is {shapes}."
    count = int(baseline.summary["count"])
    if count == 1 and size:
        values = f"{number(baseline.summary):.9g} in the baseline and {number(candidate.summary):.9g} in the candidate"
        return f"The bits of a single number differ: {values}."
    elements = "1 element" if count == 1 else f"{count} elements"
    where = f"in a tensor of {elements} ({list(baseline.shape)}, {baseline.dtype})"
    if size is None:
        return f"The bits differ, {where}."
    if size == 0.0 and not (baseline.exact and candidate.exact):
        return "Terms of this sum differ in bits, and their sum is the same."
    if size == 0.0:
        return f"The bits differ, {where}, and the numbers are equal (like 0 and -0)."
    if not math.isfinite(size):
        return f"The bits differ, {where}, by more than can be measured (NaN, infinity, or a baseline of zeros)."
    return f"The bits differ by {size:.2g} of the L2 norm, {where}."


def unknown_bits_note(keys: Collection[SiteKey]) -> str:
    """A note on sites whose bits the recordings do not tell; empty if there are none."""
    if not keys:
        return ""
    first = next(iter(keys))
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return (
        f"Not known in bits: {label(first.path, first.slot)} ({first.phase}){more}. The two runs divide these sums and "
        "means among other micro-steps or ranks, or scale them differently."
    )
