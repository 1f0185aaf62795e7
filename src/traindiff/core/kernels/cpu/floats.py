"""Floating-point dtypes: counts, extremes, sum, fingerprints and sketch, which walk the global index in blocks."""

from __future__ import annotations

from llvmlite import ir

from traindiff.core.kernels.cpu.code import Code
from traindiff.core.kernels.cpu.groups import (
    Block,
    Group,
    dot,
    folded,
    function_over_elements,
    hash_type,
    multiset_hash,
)
from traindiff.core.kernels.cpu.layout import COUNTS, FIELDS, FloatDtype, magnitude
from traindiff.core.kernels.cpu.values import F64, I64, Value, vector
from traindiff.core.kernels.reference import BLOCK


class _Totals:
    """Totals over the elements, kept in registers until `add_to` merges them into the state."""

    def __init__(self, code: Code, dtype: FloatDtype, *, wide: bool) -> None:
        self.code = code
        of = vector if wide else (lambda kind: kind)
        infinity = float("inf")
        number = of(dtype.number)
        hashes = hash_type(dtype, wide=wide)
        self.counts = {name: code.variable(code.constant(I64, 0)) for name in COUNTS}
        self.minimum = code.variable(code.constant(number, infinity))
        self.maximum = code.variable(code.constant(number, -infinity))
        self.smallest = code.variable(code.constant(number, infinity))
        self.sum = code.variable(code.constant(of(F64), 0.0))
        self.fingerprint = code.variable(code.constant(hashes, 0))
        self.multiset = code.variable(code.constant(hashes, 0))
        self.nonfinite = code.variable(code.constant(hashes, 0))
        self.signs = code.variable(code.constant(of(dtype.word), 0))

    def add_to(self, state: Value) -> None:
        """Merge everything into the state; a scalar goes into the first lane."""
        code = self.code
        self.counts["negative"].add(self.signs.value.widened(I64).total())
        for name, count in self.counts.items():
            code.merge(FIELDS[name].pointer(code, state), count.value, Value.__add__)
        for name in ("sum", "fingerprint", "multiset", "nonfinite"):
            code.merge(FIELDS[name].pointer(code, state), getattr(self, name).value, Value.__add__)
        for name, combine in (("minimum", Value.smaller), ("maximum", Value.larger), ("smallest", Value.smaller)):
            value = getattr(self, name).value.widened(F64)
            code.merge(FIELDS[name].pointer(code, state), value, combine)


def blocks_function(module: ir.Module, dtype: FloatDtype) -> ir.Function:
    """Define `void (x, first, stop, block, state)`: accumulate whole blocks.

    Elements `first` to `stop` of `x`, a multiple of 64 of them, are block `block` and those after it.
    """
    code = function_over_elements(module, f"blocks_{dtype.name}")
    x, first, stop, first_block, state = code.arguments
    totals = _Totals(code, dtype, wide=True)
    number = code.variable(first_block)
    with code.loop(first, stop, BLOCK) as start:
        block = Block(code, number.value)
        groups = block.groups(dtype, x, start, state)
        special = _special(groups[0].raw, dtype)
        for group in groups[1:]:
            special = special | _special(group.raw, dtype)
        with code.either(special.any(), likely=False) as (yes, no):
            with yes:
                _block(totals, dtype, groups, block.weight, plain=False)
            with no:
                _block(totals, dtype, groups, block.weight, plain=True)
        number.add(1)
    totals.add_to(state)
    code.finish()
    return code.function


def elements_function(module: ir.Module, dtype: FloatDtype) -> ir.Function:
    """Define `void (x, first, stop, index, state)`: accumulate part of one block, element by element.

    The element `first` of `x` has the global index `index`; none of them lies in another block.
    """
    code = function_over_elements(module, f"elements_{dtype.name}")
    x, first, stop, index, state = code.arguments
    totals = _Totals(code, dtype, wide=False)
    block = Block(code, index >> 6)
    with code.loop(first, stop, 1) as here:
        group = block.element(dtype, x, here, (index + (here - first)) & 63, state)
        _block(totals, dtype, [group], block.weight, plain=False)
    totals.add_to(state)
    code.finish()
    return code.function


def _block(totals: _Totals, dtype: FloatDtype, groups: list[Group], weight: Value, *, plain: bool) -> None:
    """Accumulate groups of one block. `plain`: all their elements are normal numbers."""
    code = totals.code
    sums: list[Value] = []
    spots: Value | None = None
    weighted: Value | None = None
    for group in groups:
        bits = group.raw.widened(dtype.word)
        value = dtype.value(group.raw)
        finite = value if plain else _count_specials(totals, dtype, bits, value)
        if plain:
            totals.signs.add(bits >> (dtype.bits - 1))  # 32-bit lanes do not overflow within a chunk
        _extremes(totals, finite, value, dtype, bits, plain=plain)
        long = finite.widened(F64)
        sums.append(long)
        signed = group.negated.choose(-long, long)
        code.store(group.buckets, code.load(group.buckets, signed.type) + signed)

        hashed = folded(bits, dtype)
        term = dot(hashed, group.lane_weights)
        weighted = term if weighted is None else weighted + term
        totals.multiset.add(multiset_hash(hashed, dtype))
        if not plain:
            term = dot(_kind(bits, dtype), group.lane_weights)
            spots = term if spots is None else spots + term
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    totals.sum.add(sums[0])
    assert weighted is not None
    totals.fingerprint.add(weighted * weight)
    if spots is not None:
        totals.nonfinite.add(spots * weight)


def _count_specials(totals: _Totals, dtype: FloatDtype, bits: Value, value: Value) -> Value:
    """Count elements that are not normal numbers; returns the values with zero in place of NaN and infinity."""
    size = bits & dtype.magnitude_mask
    signed = (bits & (dtype.magnitude_mask + 1)) > 0
    infinite = size.equals(dtype.infinity)
    nan = size > dtype.infinity
    zero = size.equals(0)
    for name, mask in (
        ("nan", nan),
        ("positive_infinity", infinite & signed.inverted()),
        ("negative_infinity", infinite & signed),
        ("zero", zero),
        ("negative", signed & (nan | zero).inverted()),
        ("subnormal", (size < dtype.smallest_normal) & zero.inverted()),
    ):
        totals.counts[name].add(mask.count())
    return (size < dtype.infinity).choose(value, 0.0)


def _extremes(totals: _Totals, finite: Value, value: Value, dtype: FloatDtype, bits: Value, *, plain: bool) -> None:
    size = magnitude(value)
    low, high, small = value, value, size
    if not plain:
        magnitude_bits = bits & dtype.magnitude_mask
        is_finite = magnitude_bits < dtype.infinity
        low = is_finite.choose(finite, float("inf"))
        high = is_finite.choose(finite, float("-inf"))
        small = (is_finite & (magnitude_bits > 0)).choose(size, float("inf"))
    totals.minimum.value = low.smaller(totals.minimum.value)
    totals.maximum.value = high.larger(totals.maximum.value)
    totals.smallest.value = small.smaller(totals.smallest.value)


def _special(raw: Value, dtype: FloatDtype) -> Value:
    """Mask of the elements that are not normal numbers, in one comparison."""
    return (raw & dtype.magnitude_mask) - dtype.smallest_normal >= dtype.infinity - dtype.smallest_normal


def _kind(bits: Value, dtype: FloatDtype) -> Value:
    """1 for NaN, 2 for +inf, 3 for -inf, else 0."""
    code = bits.code
    size = bits & dtype.magnitude_mask
    signed = (bits & (dtype.magnitude_mask + 1)) > 0
    infinite = size.equals(dtype.infinity).choose(signed.choose(code.like(bits, 3), 2), code.like(bits, 0))
    return (size > dtype.infinity).choose(code.like(bits, 1), infinite)
