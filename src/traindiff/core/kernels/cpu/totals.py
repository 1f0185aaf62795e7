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
from traindiff.core.kernels.cpu.values import F64, I64, LANES, Value, vector
from traindiff.core.kernels.reference import BLOCK

CHUNK = 32 * BLOCK
"""Elements that are read from memory once and then stay in the first-level cache: 8 kB of float32."""

_LINE_BITS = 512
_SIGN_16 = 1 << 15


def blocks_function(module: ir.Module, dtype: FloatDtype | IntegerDtype) -> ir.Function:
    """Define `void (x, first, stop, block, state)`: accumulate whole blocks.

    Elements `first` to `stop` of `x`, a multiple of 64 of them, are block `block` and those after it. The state's
    `usual` tells afterwards whether all of them are normal numbers or zero; such ones take a shorter way, in two loops,
    so that the totals of each stay in registers. The second, which takes longer, has the next chunk fetched meanwhile.
    """
    if isinstance(dtype, IntegerDtype):
        return _all_blocks_function(module, dtype, "blocks")
    unusual = _all_blocks_function(module, dtype, "unusual")
    code = function_over_elements(module, f"blocks_{dtype.name}")
    x, first, stop, first_block, state = code.arguments
    with code.when(first < stop):
        extremes = _Extremes(code, dtype)
        with code.loop(first, stop, BLOCK) as start:
            for lane in range(0, BLOCK, LANES):
                extremes.add(code.load(code.at(x, start + lane, dtype.stored), vector(dtype.stored)))
        usual = extremes.are_usual()
        code.store(FIELDS["usual"].pointer(code, state), usual.widened(I64))
        with code.either(usual, likely=True) as (yes, no):
            with yes:
                extremes.add_to(state)
                sums, number = _Sums(code, dtype), code.variable(first_block)
                with code.loop(first, stop, BLOCK) as start:
                    for line in range(0, BLOCK, _LINE_BITS // dtype.bits):
                        code.prefetch(code.at(x, start + (CHUNK + line), dtype.stored))
                    block = Block(code, number.value)
                    sums.add(block.groups(dtype, x, start, state), block.weight)
                    number.add(1)
                sums.add_to(state)
            with no:
                code.call(unusual, x, first, stop, first_block, state)
    code.finish()
    return code.function


def _all_blocks_function(module: ir.Module, dtype: FloatDtype | IntegerDtype, name: str) -> ir.Function:
    """Define the same for blocks of any elements."""
    code = function_over_elements(module, f"{name}_{dtype.name}")
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


class _Extremes:
    """Extremes and counts of floats, if all of them are normal numbers or zero.

    Magnitudes are compared as the integers that have their bits, which are in the same order. So are numbers of 16
    bits, in lanes of 16 bits, by their rank: their bits, all inverted if the number is negative, else with a sign.

    Attributes:
        least: Least magnitude minus 1, so that zero becomes the largest of all.
        greatest: Greatest magnitude.
    """

    def __init__(self, code: Code, dtype: FloatDtype) -> None:
        self._code = code
        self._dtype = dtype
        self._is_short = dtype.bits == 16
        self._ones = _all_ones(dtype.bits)
        word = vector(dtype.stored)
        order = word if self._is_short else vector(dtype.number)
        self.minimum = code.variable(code.constant(order, self._ones if self._is_short else float("inf")))
        self.maximum = code.variable(code.constant(order, 0 if self._is_short else float("-inf")))
        self.least = code.variable(code.constant(word, self._ones))
        self.greatest = code.variable(code.constant(word, 0))
        self.zero = code.variable(code.constant(word, 0))
        self.negative = code.variable(code.constant(word, 0))

    def add(self, raw: Value) -> None:
        """Accumulate a vector. Counts of one chunk do not overflow 16-bit lanes."""
        dtype = self._dtype
        size = raw & dtype.magnitude_mask
        if self._is_short:
            value = raw ^ ((self._code.like(raw, 0) - (raw >> 15)) | _SIGN_16)
            negative = value < _SIGN_16 - 1
        else:
            value = dtype.value(raw)
            negative = value < 0.0
        self.minimum.value = value.smaller(self.minimum.value)
        self.maximum.value = value.larger(self.maximum.value)
        self.least.value = (size - 1).smaller(self.least.value)
        self.greatest.value = size.larger(self.greatest.value)
        self.zero.value = self.zero.value - size.equals(0).sign_extended(dtype.stored)
        self.negative.value = self.negative.value - negative.sign_extended(dtype.stored)

    def are_usual(self) -> Value:
        """True if all elements are normal numbers or zero."""
        unusual = (self.greatest.value >= self._dtype.infinity) | (self.least.value < self._dtype.smallest_normal - 1)
        return unusual.any().inverted()

    def add_to(self, state: Value) -> None:
        """Merge everything into the state."""
        code, dtype = self._code, self._dtype
        for name in ("zero", "negative"):
            count = getattr(self, name).value.total().widened(I64)
            code.merge(FIELDS[name].pointer(code, state), count, Value.__add__)
        least = self.least.value
        smallest = dtype.value(least + 1).widened(F64)
        smallest = least.equals(self._ones).choose(code.constant(smallest.type, float("inf")), smallest)
        for name, value, combine in (
            ("minimum", self._number(self.minimum.value), Value.smaller),
            ("maximum", self._number(self.maximum.value), Value.larger),
            ("smallest", smallest, Value.smaller),
        ):
            code.merge(FIELDS[name].pointer(code, state), value, combine)

    def _number(self, ordered: Value) -> Value:
        """A minimum or maximum in float64."""
        if self._is_short:
            ordered = self._dtype.value((ordered < _SIGN_16).choose(ordered ^ self._ones, ordered ^ _SIGN_16))
        return ordered.widened(F64)


class _Sums:
    """Sum, fingerprints and sketch of floats that are normal numbers or zero."""

    def __init__(self, code: Code, dtype: FloatDtype) -> None:
        self._code = code
        self._dtype = dtype
        hashes = hash_type(dtype, wide=True)
        self.sum = code.variable(code.constant(vector(F64), 0.0))
        self.fingerprint = code.variable(code.constant(hashes, 0))
        self.multiset = code.variable(code.constant(hashes, 0))

    def add(self, groups: list[Group], weight: Value) -> None:
        """Accumulate groups of one block."""
        code, dtype = self._code, self._dtype
        sums, terms, hashes = [], [], []
        for group in groups:
            hashed = folded(group.raw.widened(dtype.word), dtype)
            terms.append(dot(hashed, group.lane_weights))
            hashes.append(multiset_hash(hashed, dtype))
            long = dtype.value(group.raw).widened(F64)
            sums.append(long)
            group.add_to_sketch(code, long)
        self.sum.add(_added(sums))
        self.fingerprint.add(_added(terms) * weight)
        self.multiset.add(_added(hashes))

    def add_to(self, state: Value) -> None:
        """Merge everything into the state."""
        for name in ("sum", "fingerprint", "multiset"):
            self._code.merge(FIELDS[name].pointer(self._code, state), getattr(self, name).value, Value.__add__)


def _added(values: list[Value]) -> Value:
    """The sum of a power of two of values: neighbors first, then pairs of neighbors."""
    while len(values) > 1:
        values = [left + right for left, right in zip(values[::2], values[1::2], strict=True)]
    return values[0]


class _Floats:
    """Totals over floats, kept in registers until `add_to` merges them into the state.

    If `wide`, whole blocks are added; otherwise single elements.
    """

    def __init__(self, code: Code, dtype: FloatDtype, *, wide: bool) -> None:
        self._code = code
        self._dtype = dtype
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

    def add(self, groups: list[Group], weight: Value) -> None:
        """Accumulate groups of one block."""
        code, dtype = self._code, self._dtype
        sums, terms, spots = [], [], []
        for group in groups:
            bits = group.raw.widened(dtype.word)
            value = dtype.value(group.raw)
            finite = self._count_specials(bits, value)
            self._extremes(finite, value, bits)
            long = finite.widened(F64)
            sums.append(long)
            group.add_to_sketch(code, long)
            hashed = folded(bits, dtype)
            terms.append(dot(hashed, group.lane_weights))
            spots.append(dot(self._kind(bits), group.lane_weights))
            self.multiset.add(multiset_hash(hashed, dtype))
        self.sum.add(_added(sums))
        self.fingerprint.add(_added(terms) * weight)
        self.nonfinite.add(_added(spots) * weight)

    def add_to(self, state: Value) -> None:
        """Merge everything into the state; a scalar goes into the first lane."""
        code = self._code
        for name, count in self.counts.items():
            code.merge(FIELDS[name].pointer(code, state), count.value, Value.__add__)
        for name in ("sum", "fingerprint", "multiset", "nonfinite"):
            code.merge(FIELDS[name].pointer(code, state), getattr(self, name).value, Value.__add__)
        for name, combine in (("minimum", Value.smaller), ("maximum", Value.larger), ("smallest", Value.smaller)):
            value = getattr(self, name).value.widened(F64)
            code.merge(FIELDS[name].pointer(code, state), value, combine)

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

    def _extremes(self, finite: Value, value: Value, bits: Value) -> None:
        magnitude_bits = bits & self._dtype.magnitude_mask
        is_finite = magnitude_bits < self._dtype.infinity
        low = is_finite.choose(finite, float("inf"))
        high = is_finite.choose(finite, float("-inf"))
        small = (is_finite & (magnitude_bits > 0)).choose(magnitude(value), float("inf"))
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
