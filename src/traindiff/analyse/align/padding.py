"""Inputs that hold the same values in both runs, but for padding: sequences of another length, or packed ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import MergedSite
from traindiff.core.kernels.reference import fold, multiset_hash
from traindiff.core.summary import finite_count

_USUAL = (0.0, -100.0, -1.0, 1.0)
"""What batches are usually padded with: zeros, labels that a loss ignores, masks."""


def padding_of(pair: Pair) -> str:
    """What one run's input holds beside the other's values, in words after its name; empty if that is no padding.

    Fingerprints of elements without their places add up. So if an input holds the other one's values and n elements of
    value v, the difference of these fingerprints is n times that of v. v is looked for among the usual values and the
    extremes of the longer input, as sums of whole numbers are not recorded.
    """
    baseline, candidate = pair.baseline, pair.candidate
    further = int(candidate.summary["count"]) - int(baseline.summary["count"])
    if baseline.dtype != candidate.dtype or not further or not (baseline.exact and candidate.exact):
        return ""
    longer, shorter = (candidate, baseline) if further > 0 else (baseline, candidate)
    if not int(shorter.summary["count"]):
        return ""
    apart = (int(longer.summary["multiset"]) - int(shorter.summary["multiset"])) % 2**64
    for value in _values(longer):
        hashed = _hash(value, longer.dtype)
        if hashed is not None and hashed * abs(further) % 2**64 == apart:
            if further > 0:
                return f"holds the baseline's values and {further:,} more that are {value:g}"
            return f"lacks {-further:,} of the baseline's values, all of which are {value:g}"
    return ""


def _values(entry: MergedSite) -> Iterator[float]:
    yield from _USUAL
    if int(finite_count(entry.summary)):
        yield from (float(entry.summary[name]) for name in ("minimum", "maximum"))


def _hash(value: float, dtype: str) -> int | None:
    """What one element of a value adds to the fingerprint without places; None if the dtype does not hold the value."""
    number_type = np.dtype({"bfloat16": "float32", "bool": "uint8"}.get(dtype, dtype))
    if number_type.kind in "iu" and not np.iinfo(number_type).min <= value <= np.iinfo(number_type).max:
        return None
    element = np.array(value).astype(number_type)
    if float(element) != value:
        return None
    bits = element.view(f"u{number_type.itemsize}").astype(np.uint64)
    short = 16 if dtype == "bfloat16" else 0
    wide = number_type.itemsize == 8
    return int(multiset_hash(fold(bits) if wide else bits >> np.uint64(short), wide=wide))
