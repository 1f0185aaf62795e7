"""Counts, extremes, sum, fingerprints and sketch: everything that walks the global index in blocks."""

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
from traindiff.core.kernels.cpu.layout import COUNTS, FIELDS, FloatDtype, IntegerDtype, magnitude
from traindiff.core.kernels.cpu.values import F64, I64, Value, vector
from traindiff.core.kernels.reference import BLOCK


def blocks_function(module: ir.Module, dtype: FloatDtype | IntegerDtype) -> ir.Function:
    """Define `void (x, first, stop, block, state)`: accumulate whole blocks.

    Elements `first` to `stop` of `x`, a multiple of 64 of them, are block `block` and those after it.
    """
    code = function_over_elements(module, f"blocks_{dtype.name}")
    x, first, stop, first_block, state = code.arguments
    totals = _totals(code, dtype, wide=True)
    number = code.variable(first_block)
    with code.when(first < stop):
        with code.loop(first, stop, BLOCK) as start:
            block = Block(code, number.value)
            totals.add(block.groups(dtype, x, start, state), block.weight)
            number.add(1)
        totals.add_to(state)
    code.finish()
    return code.function


def elements_function(module: ir.Module, dtype: FloatDtype | IntegerDtype) -> ir.Function:
    """Define `void (x, first, stop, index, state)`: accumulate part of one block, element by element.

    The element `first` of `x` has the global index `index`; none of them lies in another block.
    """
    code = function_over_elements(module, f"elements_{dtype.name}")
    x, first, stop, index, state = code.arguments
    totals = _totals(code, dtype, wide=False)
    block = Block(code, index >> 6)
    with code.when(first < stop):
        with code.loop(first, stop, 1) as here:
            totals.add([block.element(dtype, x, here, (index + (here - first)) & 63, state)], block.weight)
        totals.add_to(state)
    code.finish()
    return code.function


def _totals(code: Code, dtype: FloatDtype | IntegerDtype, *, wide: bool) -> _Floats | _Integers:
    return _Floats(code, dtype, wide=wide) if isinstance(dtype, FloatDtype) else _Integers(code, dtype, wide=wide)


class _Floats:
    """Totals over floats, kept in registers until `add_to` merges them into the state.

    If `wide`, whole blocks are added; otherwise single elements.
    """

    def __init__(self, code: Code, dtype: FloatDtype, *, wide: bool) -> None:
        self._code = code
        self._dtype = dtype
        self._wide = wide
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

    def add(self, groups: list[Group], weight: Value) -> None:
        """Accumulate groups of one block; a whole block of normal numbers, as most are, costs less."""
        if not self._wide:
            self._add(groups, weight, plain=False)
            return
        special = self._special(groups[0].raw)
        for group in groups[1:]:
            special = special | self._special(group.raw)
        with self._code.either(special.any(), likely=False) as (yes, no):
            with yes:
                self._add(groups, weight, plain=False)
            with no:
                self._add(groups, weight, plain=True)

    def add_to(self, state: Value) -> None:
        """Merge everything into the state; a scalar goes into the first lane."""
        code = self._code
        self.counts["negative"].add(self.signs.value.widened(I64).total())
        for name, count in self.counts.items():
            code.merge(FIELDS[name].pointer(code, state), count.value, Value.__add__)
        for name in ("sum", "fingerprint", "multiset", "nonfinite"):
            code.merge(FIELDS[name].pointer(code, state), getattr(self, name).value, Value.__add__)
        for name, combine in (("minimum", Value.smaller), ("maximum", Value.larger), ("smallest", Value.smaller)):
            value = getattr(self, name).value.widened(F64)
            code.merge(FIELDS[name].pointer(code, state), value, combine)

    def _special(self, raw: Value) -> Value:
        """Mask of the elements that are not normal numbers, in one comparison."""
        dtype = self._dtype
        return (raw & dtype.magnitude_mask) - dtype.smallest_normal >= dtype.infinity - dtype.smallest_normal

    def _add(self, groups: list[Group], weight: Value, *, plain: bool) -> None:
        """Accumulate groups of one block. `plain`: all their elements are normal numbers."""
        code, dtype = self._code, self._dtype
        sums: list[Value] = []
        spots: Value | None = None
        weighted: Value | None = None
        for group in groups:
            bits = group.raw.widened(dtype.word)
            value = dtype.value(group.raw)
            finite = value if plain else self._count_specials(bits, value)
            if plain:
                self.signs.add(bits >> (dtype.bits - 1))  # 32-bit lanes do not overflow within a chunk
            self._extremes(finite, value, bits, plain=plain)
            long = finite.widened(F64)
            sums.append(long)
            signed = group.negated.choose(-long, long)
            code.store(group.buckets, code.load(group.buckets, signed.type) + signed)

            hashed = folded(bits, dtype)
            term = dot(hashed, group.lane_weights)
            weighted = term if weighted is None else weighted + term
            self.multiset.add(multiset_hash(hashed, dtype))
            if not plain:
                term = dot(self._kind(bits), group.lane_weights)
                spots = term if spots is None else spots + term
        while len(sums) > 1:
            sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
        self.sum.add(sums[0])
        assert weighted is not None
        self.fingerprint.add(weighted * weight)
        if spots is not None:
            self.nonfinite.add(spots * weight)

    def _count_specials(self, bits: Value, value: Value) -> Value:
        """Count elements that are not normal numbers; returns the values with zero in place of NaN and infinity."""
        dtype = self._dtype
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
            self.counts[name].add(mask.count())
        return (size < dtype.infinity).choose(value, 0.0)

    def _extremes(self, finite: Value, value: Value, bits: Value, *, plain: bool) -> None:
        size = magnitude(value)
        low, high, small = value, value, size
        if not plain:
            magnitude_bits = bits & self._dtype.magnitude_mask
            is_finite = magnitude_bits < self._dtype.infinity
            low = is_finite.choose(finite, float("inf"))
            high = is_finite.choose(finite, float("-inf"))
            small = (is_finite & (magnitude_bits > 0)).choose(size, float("inf"))
        self.minimum.value = low.smaller(self.minimum.value)
        self.maximum.value = high.larger(self.maximum.value)
        self.smallest.value = small.smaller(self.smallest.value)

    def _kind(self, bits: Value) -> Value:
        """1 for NaN, 2 for +inf, 3 for -inf, else 0."""
        code, dtype = self._code, self._dtype
        size = bits & dtype.magnitude_mask
        signed = (bits & (dtype.magnitude_mask + 1)) > 0
        infinite = size.equals(dtype.infinity).choose(signed.choose(code.like(bits, 3), 2), code.like(bits, 0))
        return (size > dtype.infinity).choose(code.like(bits, 1), infinite)


class _Integers:
    """The same of integers and booleans, which have counts, extremes and fingerprints only.

    Attributes:
        least: Least rank of an element: an unsigned number that is ordered as the elements are.
        greatest: Greatest rank.
        smallest: Smallest magnitude minus 1, so that zero becomes the largest of all.
    """

    def __init__(self, code: Code, dtype: IntegerDtype, *, wide: bool) -> None:
        self._code = code
        self._dtype = dtype
        word = vector(dtype.word) if wide else dtype.word
        hashes = hash_type(dtype, wide=wide)
        self.zero = code.variable(code.constant(I64, 0))
        self.negative = code.variable(code.constant(I64, 0))
        self.least = code.variable(code.constant(word, _all_ones(dtype.word.width)))
        self.greatest = code.variable(code.constant(word, 0))
        self.smallest = code.variable(code.constant(word, _all_ones(dtype.word.width)))
        self.fingerprint = code.variable(code.constant(hashes, 0))
        self.multiset = code.variable(code.constant(hashes, 0))

    def add(self, groups: list[Group], weight: Value) -> None:
        """Accumulate groups of one block."""
        for group in groups:
            bits = group.raw.widened(self._dtype.word)
            self._add_numbers(bits)
            hashed = folded(bits, self._dtype)
            self.fingerprint.add(dot(hashed, group.lane_weights) * weight)
            self.multiset.add(multiset_hash(hashed, self._dtype))

    def _add_numbers(self, bits: Value) -> None:
        if self._dtype.name == "bool":
            bits = (bits > 0).widened(self._dtype.word)
        rank, size = bits, bits
        if self._dtype.signed:
            sign = 1 << (self._dtype.bits - 1)
            is_negative = (bits & sign) > 0
            self.negative.add(is_negative.count())
            rank = bits ^ sign
            opposite = (self._code.like(bits, 0) - bits) & _all_ones(self._dtype.bits)
            size = is_negative.choose(opposite, bits)
        self.zero.add(bits.equals(0).count())
        self.least.value = rank.smaller(self.least.value)
        self.greatest.value = rank.larger(self.greatest.value)
        self.smallest.value = (size - 1).smaller(self.smallest.value)

    def add_to(self, state: Value) -> None:
        """Merge everything into the state, after at least one element; a scalar goes into the first lane."""
        code = self._code
        for name in ("zero", "negative", "fingerprint", "multiset"):
            code.merge(FIELDS[name].pointer(code, state), getattr(self, name).value, Value.__add__)
        is_none = self.smallest.value.equals(_all_ones(self._dtype.word.width))
        smallest = (self.smallest.value + 1).widened(I64).to_float(signed=False)
        smallest = is_none.choose(code.constant(smallest.type, float("inf")), smallest)
        code.merge(FIELDS["minimum"].pointer(code, state), self._number(self.least.value), Value.smaller)
        code.merge(FIELDS["maximum"].pointer(code, state), self._number(self.greatest.value), Value.larger)
        code.merge(FIELDS["smallest"].pointer(code, state), smallest, Value.smaller)

    def _number(self, rank: Value) -> Value:
        """The number that has this rank."""
        zero = 1 << (self._dtype.bits - 1) if self._dtype.signed else 0
        return (rank.widened(I64) - zero).to_float(signed=True)


def _all_ones(bits: int) -> int:
    return (1 << bits) - 1
