"""Integers and booleans: counts, extremes and fingerprints, which walk the global index in blocks."""

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
from traindiff.core.kernels.cpu.layout import FIELDS, IntegerDtype
from traindiff.core.kernels.cpu.values import I64, Value, vector
from traindiff.core.kernels.reference import BLOCK


class _Totals:
    """Totals over the elements, kept in registers until `add_to` merges them into the state.

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


def blocks_function(module: ir.Module, dtype: IntegerDtype) -> ir.Function:
    """Define `void (x, first, stop, block, state)`; see `traindiff.core.kernels.cpu.floats.blocks_function`."""
    code = function_over_elements(module, f"blocks_{dtype.name}")
    x, first, stop, first_block, state = code.arguments
    totals = _Totals(code, dtype, wide=True)
    number = code.variable(first_block)
    with code.when(first < stop):
        with code.loop(first, stop, BLOCK) as start:
            block = Block(code, number.value)
            totals.add(block.groups(dtype, x, start, state), block.weight)
            number.add(1)
        totals.add_to(state)
    code.finish()
    return code.function


def elements_function(module: ir.Module, dtype: IntegerDtype) -> ir.Function:
    """Define `void (x, first, stop, index, state)`; see `traindiff.core.kernels.cpu.floats.elements_function`."""
    code = function_over_elements(module, f"elements_{dtype.name}")
    x, first, stop, index, state = code.arguments
    totals = _Totals(code, dtype, wide=False)
    block = Block(code, index >> 6)
    with code.when(first < stop):
        with code.loop(first, stop, 1) as here:
            totals.add([block.element(dtype, x, here, (index + (here - first)) & 63, state)], block.weight)
        totals.add_to(state)
    code.finish()
    return code.function


def _all_ones(bits: int) -> int:
    return (1 << bits) - 1
