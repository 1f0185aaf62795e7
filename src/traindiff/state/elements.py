"""How two tensors of one shape differ, from one pass over their elements: a few megabytes of each are in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.summary import UNIT_ROUNDOFF
from traindiff.state.dtypes import ITEM_BYTES, TOO_LARGE, Bits, decoded, gap, is_float, rounded, shorter, truncated
from traindiff.state.measured import common_dtype
from traindiff.state.stored import StoredTensor

_PARTS = {"complex64": "f4", "complex128": "f8"}
"""Of a complex dtype, that of the real and the imaginary part."""

_BLOCK = 1 << 17
"""Elements that are worked on at a time, so that intermediate arrays stay in the cache."""

_LEAST_IN_GAPS = 0.15
"""A difference that is smaller, in gaps between numbers of a dtype, is not called a rounding to that dtype."""

_PLAIN_EXPONENTS = 300
"""Numbers between 2 to the power of minus this and this have squares whose sums are float64."""

UNFIT = "in which its largest numbers do not fit"
"""What is said of a rounding that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementDifference:
    """How two tensors differ.

    Attributes:
        kind: `bits`, `cast`, `through`, `overflow`, `scaled`, `offset` or `other`.
        message: A clause of which the candidate's tensor is the subject.
        evidence: Numbers, by name.
    """

    kind: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


class _Totals:
    """What is added up over slabs."""

    def __init__(self, baseline: StoredTensor, candidate: StoredTensor) -> None:
        self.baseline, self.candidate = baseline.dtype, candidate.dtype
        self.count = self.unequal = 0
        self.signs = self.payloads = 0  # zeros of other signs and NaN of other bits, while all numbers are the same
        self.num_rows = baseline.rows
        self.rows = [0, -1, -1]  # how many have unequal elements, the first, the last
        self.squares = self.product = self.apart = self.candidate_squares = 0.0
        self.exponents = [0, 0, 0]  # of two, by which the baseline, the candidate and what is apart are divided there
        self.largest = 0.0
        self.extremes = [0.0, 0.0]
        self.low, self.high = math.inf, -math.inf
        self.finite = True
        short = common_dtype(baseline.dtype, candidate.dtype)
        self.one_dtype = baseline.dtype == candidate.dtype
        self.through = {
            dtype: [dtype != baseline.dtype, dtype != candidate.dtype]
            for dtype in _between(baseline.dtype, candidate.dtype)
        }
        self.in_gaps = dict.fromkeys(self.through, 0.0)
        self.short = None if self.one_dtype else short
        self.cut = self.beside = self.short is not None
        self.unrounded = 0
        self.both = short is None and is_float(baseline.dtype) and is_float(candidate.dtype)

    def add(self, baseline: NDArray[Any], candidate: NDArray[Any], first: int, end: int) -> None:
        """Add the values of the rows from `first` to `end`."""
        wide, other = baseline.astype(np.float64), candidate.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            same = (wide == other) | (np.isnan(wide) & np.isnan(other))
            apart = np.where(same, 0.0, other - wide)
            self.finite = self.finite and bool(np.isfinite(apart).all())
            self.count += apart.size
            self._count(*self._in_one_dtype(baseline, candidate), first, end)
            if self.one_dtype and not self.unequal:
                self.count_bits(baseline, candidate)
            finite = [np.where(np.isfinite(one), one, 0.0) for one in (wide, other)]
            sizes = [float(np.abs(one).max(initial=0.0)) for one in finite]
            self.extremes = [max(pair) for pair in zip(self.extremes, sizes, strict=True)]
            self.largest = max(self.largest, float(np.abs(apart).max(initial=0.0)))
            self._add_squares(*finite, apart)
            self.low, self.high = min(self.low, float(apart.min())), max(self.high, float(apart.max()))
        for dtype, holds in self.through.items():
            holds[0] = holds[0] and _is_rounded(baseline, dtype, candidate, self.candidate)
            holds[1] = holds[1] and _is_rounded(candidate, dtype, baseline, self.baseline)
            if self.one_dtype and any(holds):
                with np.errstate(invalid="ignore"):
                    self.in_gaps[dtype] += float(np.nansum(np.square(apart / gap(wide, dtype))))
        if self.short is not None and (self.cut or self.beside):
            long, short = (wide, other) if self.short == self.candidate else (other, wide)
            self._cast(long, short, self.short)
        if self.both:
            allowed = (gap(wide, self.baseline) + gap(other, self.candidate)) / 2
            self.both = bool((np.abs(apart) <= allowed).all())

    def _add_squares(self, *values: NDArray[np.float64]) -> None:
        """Add squares and products; of numbers beyond 2^300 or below 2^-300 so that they fit into float64."""
        before = self.exponents
        self.exponents = [_exponent(one) for one in (*self.extremes, self.largest)]
        if before != self.exponents:
            own, other, apart = (old - new for old, new in zip(before, self.exponents, strict=True))
            self.squares, self.product = math.ldexp(self.squares, 2 * own), math.ldexp(self.product, own + other)
            self.candidate_squares = math.ldexp(self.candidate_squares, 2 * other)
            self.apart = math.ldexp(self.apart, 2 * apart)
        first, second, apart_values = (
            np.ldexp(one, -exponent) if exponent else one for one, exponent in zip(values, self.exponents, strict=True)
        )
        self.squares += float(first @ first)
        self.candidate_squares += float(second @ second)
        self.product += float(first @ second)
        self.apart += float(apart_values @ apart_values)

    def _in_one_dtype(self, baseline: NDArray[Any], candidate: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Both, the longer one rounded as the shorter one is."""
        if self.short is None:
            return baseline, candidate
        return _through(baseline, self.short), _through(candidate, self.short)

    def _count(self, baseline: NDArray[Any], candidate: NDArray[Any], first: int, end: int) -> None:
        unequal = (baseline != candidate) & ~(np.isnan(baseline) & np.isnan(candidate))
        self.unequal += int(np.count_nonzero(unequal))
        rows = np.flatnonzero(unequal.reshape(end - first, -1).any(axis=1)) + first
        if len(rows):
            self.rows = [self.rows[0] + len(rows), self.rows[1] if self.rows[0] else int(rows[0]), int(rows[-1])]

    def count_bits(self, baseline: NDArray[Any], candidate: NDArray[Any]) -> None:
        """Count zeros of other signs and NaN of other bits, among numbers that are the same."""
        bits = f"u{baseline.itemsize}"
        unlike = baseline.view(bits) != candidate.view(bits)
        if unlike.any():
            num_nan = int(np.count_nonzero(unlike & np.isnan(baseline)))
            self.payloads += num_nan
            self.signs += int(np.count_nonzero(unlike)) - num_nan

    def _cast(self, long: NDArray[Any], short: NDArray[Any], dtype: str) -> None:
        self.cut = self.cut and bool(np.array_equal(truncated(long, dtype), short))
        # neighbors of the dtype on both sides: less than one gap away, measured where the gap is smaller
        spacing = np.minimum(gap(long, dtype), np.maximum(gap(short, dtype), gap(long, dtype)))
        with np.errstate(invalid="ignore"):
            self.beside = self.beside and bool(((short == long) | (np.abs(short - long) < spacing)).all())
        if self.beside:
            self.unrounded += int(np.count_nonzero(_through(long, dtype) != short))


def _exponent(largest: float) -> int:
    found = math.frexp(largest)[1]
    return found if abs(found) > _PLAIN_EXPONENTS else 0


def _times(value: float, exponent: int) -> float:
    """`value * 2^exponent`; infinite where that is too large."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(math.inf, value)


def _through(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    return decoded(rounded(values, dtype), dtype).astype(values.dtype)


def _is_rounded(values: NDArray[Any], between: str, others: NDArray[Any], dtype: str) -> bool:
    """True if others, of this dtype, are the values after rounding them to the one between, and then to the dtype."""
    made = decoded(rounded(decoded(rounded(values, between), between), dtype), dtype)
    return np.array_equal(made, others, equal_nan=True)


_FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""Dtypes in which numbers may have been in between, from long to short."""


def _between(baseline: str, candidate: str) -> list[str]:
    """Dtypes that lack some numbers of the shorter of two dtypes, or are that one if neither holds the other."""
    longer = [dtype for dtype in (baseline, candidate) if candidate in shorter(dtype) or baseline in shorter(dtype)]
    short = common_dtype(baseline, candidate)
    return [
        dtype
        for dtype in _FLOATS
        if dtype not in longer and dtype != short and not {baseline, candidate} & {*shorter(dtype)}
    ]


def element_difference(baseline: StoredTensor, candidate: StoredTensor) -> ElementDifference:
    """How the candidate's tensor differs from the baseline's, which has the same shape and other bits.

    Raises:
        CheckpointError: A file has ended.
    """
    total = _Totals(baseline, candidate)
    numeric = is_float(baseline.dtype) and is_float(candidate.dtype)
    for begin, end in baseline.slabs:
        first, second = baseline.slab(begin, end), candidate.slab(begin, end)
        if numeric:
            inner = first.size // (end - begin)
            step = max(1, _BLOCK // max(1, inner))
            for low in range(begin, end, step):
                high = min(low + step, end)
                part = slice((low - begin) * inner, (high - begin) * inner)
                total.add(decoded(first[part], baseline.dtype), decoded(second[part], candidate.dtype), low, high)
        else:
            words = ITEM_BYTES[baseline.dtype] // first.itemsize
            total.count += first.size // words
            if baseline.dtype == candidate.dtype and (parts := _PARTS.get(baseline.dtype)):
                pairs = [one.view(parts).reshape(-1, 2) for one in (first, second)]
                apart = (pairs[0] != pairs[1]) & ~(np.isnan(pairs[0]) & np.isnan(pairs[1]))
                total.unequal += int(np.count_nonzero(apart.any(axis=1)))
                total.count_bits(*pairs)
            elif words > 1 and baseline.dtype == candidate.dtype:
                total.unequal += int(np.count_nonzero((first != second).reshape(-1, words).any(axis=1)))
            else:
                total.unequal += _unequal(first, second, baseline.dtype, candidate.dtype)
    if not numeric and not total.unequal and (total.signs or total.payloads):
        return _in_other_bits(total)
    if not numeric:
        evidence = {"unequal": total.unequal, "elements": total.count}
        if not total.unequal:
            message = f"is the baseline's, as {candidate.dtype} in place of {baseline.dtype}"
            return ElementDifference(kind="cast", message=message, evidence=evidence)
        message = f"differs in {total.unequal} of {total.count} elements"
        return ElementDifference(kind="other", message=message, evidence=evidence)
    return _judged(total)


def _unequal(first: Bits, second: Bits, baseline: str, candidate: str) -> int:
    """How many elements differ, in a dtype that is not computed with: by value for integers, by bits for the others."""
    if baseline == candidate:
        return int(np.count_nonzero(first != second))
    if not all(dtype == "bool" or "int" in dtype or is_float(dtype) for dtype in (baseline, candidate)):
        return first.size
    pair = decoded(first, baseline), decoded(second, candidate)
    if is_float(baseline) or is_float(candidate):
        whole, real = pair if is_float(candidate) else pair[::-1]
        return int(np.count_nonzero(~_same_numbers(whole, real)))
    negative = (pair[0] < 0) != (pair[1] < 0)
    return int(np.count_nonzero((pair[0].astype(np.uint64) != pair[1].astype(np.uint64)) | negative))


def _same_numbers(whole: NDArray[Any], real: NDArray[Any]) -> NDArray[np.bool_]:
    """Where integers are floating-point numbers exactly: NumPy compares them after rounding the integers."""
    wide, limits = real.astype(np.float64), np.iinfo(whole.dtype)
    fits = (wide >= float(limits.min)) & (wide < float(limits.max // 2 + 1) * 2.0)
    as_whole = np.where(fits, wide, 0.0).astype(whole.dtype)
    return np.asarray(fits & (as_whole == whole) & (as_whole.astype(np.float64) == wide))


def _judged(total: _Totals) -> ElementDifference:
    if not total.unequal:
        return _in_other_bits(total)
    for dtype, (candidates, baselines) in total.through.items():
        # rounding is off by 0.29 gaps (rms of a uniform distribution); a small change of rounded numbers by far less
        far = not total.one_dtype or math.sqrt(total.in_gaps[dtype] / max(1, total.unequal)) > _LEAST_IN_GAPS
        if (candidates or baselines) and far:
            return _rounded_between(total, dtype, of_candidate=candidates)
    if total.short is not None and total.cut:
        message = f"is the baseline's as {total.short}, cut off and not rounded to nearest"
        if total.short == total.baseline:
            message = f"has more digits: the baseline's is it as {total.short}, cut off and not rounded to nearest"
        return ElementDifference(kind="cast", message=message, evidence={"dtype": total.short, "rounding": "truncated"})
    if total.short is not None and total.beside:
        share = total.unrounded / max(1, total.count)
        message = (
            f"is the baseline's up to a rounding to {total.short} that is not to nearest: every element is one of the "
            f"two numbers around it, and {share:.2g} of them are not the nearer one"
        )
        evidence = {"dtype": total.short, "rounding": "other", "not_nearest": total.unrounded}
        return ElementDifference(kind="cast", message=message, evidence=evidence)
    if total.both:
        message = f"is {total.candidate} and the baseline's {total.baseline}: both can be one tensor, rounded"
        return ElementDifference(kind="cast", message=message, evidence={"dtype": total.candidate, "rounding": "both"})
    return _sized(total)


def _rounded_between(total: _Totals, dtype: str, *, of_candidate: bool) -> ElementDifference:
    """The clause on numbers of one side that were rounded to a dtype in between."""
    end = total.candidate if of_candidate else total.baseline
    how = f"rounded to {dtype} and stored as {end}"
    if dtype == end:
        how = f"rounded to {dtype}"
    elif dtype not in shorter(end):
        how = f"rounded to {dtype} and then to {end}"
    message = f"is the baseline's, {how}" if of_candidate else f"has more digits: the baseline's is it {how}"
    evidence = {"dtype": dtype, "rounded": "candidate" if of_candidate else "baseline"}
    if total.extremes[0 if of_candidate else 1] >= min(TOO_LARGE[dtype], TOO_LARGE[end]):
        return ElementDifference(kind="overflow", message=f"{message}, {UNFIT}", evidence=evidence)
    return ElementDifference(kind="cast" if dtype == end else "through", message=message, evidence=evidence)


def _sized(total: _Totals) -> ElementDifference:
    evidence: dict[str, Any] = {"unequal": total.unequal, "elements": total.count}
    counted = f"{total.unequal} of {total.count} elements differ{_rows_text(total)}"
    if total.rows[0]:
        evidence |= {"rows": total.rows[0], "first_row": total.rows[1], "last_row": total.rows[2]}
    if not total.finite:
        return ElementDifference(
            kind="other", message=f"differs, also in NaN or infinity: {counted}", evidence=evidence
        )
    size, u = math.sqrt(total.squares), max(UNIT_ROUNDOFF[total.baseline], UNIT_ROUNDOFF[total.candidate])
    own, other, apart = total.exponents
    relative = _times(math.sqrt(total.apart) / size, apart - own) if size else math.inf
    error = 1e-7 + 4 * u / math.sqrt(total.count)  # roundings of elements average out
    evidence |= {"relative": relative if math.isfinite(relative) else None, "largest": total.largest}
    if size and total.candidate_squares:
        ratio = total.product / total.squares
        scale = _times(ratio, other - own)
        left = math.sqrt(max(0.0, total.candidate_squares - ratio * total.product)) / math.sqrt(total.candidate_squares)
        is_other = math.isfinite(scale) and abs(scale - 1.0) > max(8 * u, error)
        if left <= max(2 * u, 5e-8) and is_other and total.count > 2:
            evidence["scale"] = scale
            return ElementDifference(
                kind="scaled", message=f"is the baseline's times {shown_number(scale, error)}", evidence=evidence
            )
    middle = total.low / 2 + total.high / 2
    spread = 4 * u * (abs(middle) + _times(math.sqrt(total.squares / total.count) * 8, own))
    if (
        total.count > 2
        and total.unequal == total.count
        and abs(middle) > 16 * spread
        and total.high - total.low <= spread
    ):
        evidence["offset"] = middle
        shown = shown_number(middle, u + (total.high - total.low) / abs(middle))
        return ElementDifference(
            kind="offset",
            message=f"is the baseline's plus {shown} in every element",
            evidence=evidence,
        )
    shown = f"relative L2 difference {relative:.3g}" if size else "the baseline's is zero"
    if size and not math.isfinite(relative):
        shown = "relative L2 difference above 1e308"
    return ElementDifference(kind="other", message=f"differs: {shown}, {counted}", evidence=evidence)


def _in_other_bits(total: _Totals) -> ElementDifference:
    """The clause on the same numbers, after rounding to the shorter dtype."""
    evidence: dict[str, Any] = {"unequal": 0, "elements": total.count}
    if not total.one_dtype:
        short = f" in {total.short}" if total.short else ""
        message = (
            f"is the baseline's as {total.candidate}: the same numbers{short}, in other bits (like 0 and -0, or NaN)"
        )
        overflown = total.short is not None and max(total.extremes) >= TOO_LARGE[total.short]
        return ElementDifference(
            kind="overflow" if overflown else "cast",
            message=f"{message}, {UNFIT}" if overflown else message,
            evidence=evidence,
        )
    zeros = f"{total.signs} zero{'' if total.signs == 1 else 's'} of the other sign"
    nan = f"{total.payloads} NaN with other bits"
    parts = [text for text, count in ((zeros, total.signs), (nan, total.payloads)) if count]
    message = f"has the same numbers in other bits: {' and '.join(parts)}"
    evidence |= {"zeros": total.signs, "nan": total.payloads}
    return ElementDifference(kind="bits", message=message, evidence=evidence)


def _rows_text(total: _Totals) -> str:
    """Which rows differ, if they are few; and that rounding is not counted."""
    count, first, last = total.rows
    rounding = "" if total.short is None else " by more than rounding"
    if not count or 4 * count > total.num_rows or total.num_rows < 8:
        return rounding
    if count == 1:
        return f"{rounding}, all in row {first} of {total.num_rows}"
    return f"{rounding}, in {count} of {total.num_rows} rows ({first} to {last})"


def shown_number(value: float, error: float) -> str:
    """A number with as few digits after the point as it has within its relative error, at most nine; or with six."""
    for digits in range(10):
        near = round(value, digits)
        if near and abs(near - value) <= error * abs(value):
            return f"{near:.12g}"
    return f"{value:.6g}"
