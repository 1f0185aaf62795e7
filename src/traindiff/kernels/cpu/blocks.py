"""Counts, extremes, sum, fingerprints and sketch: everything that walks the global index in blocks of 64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llvmlite import ir

from traindiff.kernels import hashing
from traindiff.kernels.cpu.code import F64, I32, I64, LANES, POINTER, Code, Value, Variable, element_of, vector
from traindiff.kernels.cpu.dtypes import FloatDtype, magnitude
from traindiff.kernels.cpu.state import COUNTS, FIELDS
from traindiff.kernels.hashing import BLOCK

_GROUPS = BLOCK // LANES
_SIGNATURE = ir.FunctionType(ir.VoidType(), [POINTER, I64, I64, I64, POINTER])


@dataclass(frozen=True, slots=True)
class _Group:
    """Elements that are worked on together: a vector of LANES in a block, or one element.

    Attributes:
        raw: Bits as they are in memory.
        lane_weights: L(lane) of each; of the even and of the odd lanes apart where words have 32 bits.
        negated: Mask of those that enter the sketch negated.
        buckets: Pointer to the sketch bucket of the first; the others follow it.
    """

    raw: Value
    lane_weights: tuple[Value, ...]
    negated: Value
    buckets: Value


class _Totals:
    """What is accumulated over the elements: in registers, until `add_to` puts it into the state."""

    def __init__(self, code: Code, dtype: FloatDtype, *, wide: bool) -> None:
        self.code = code
        of = vector if wide else (lambda kind: kind)
        infinity = float("inf")
        number = of(dtype.number)
        hashes = ir.VectorType(I64, LANES * dtype.word.width // 64) if wide else I64
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
        _add(self.counts["negative"], self.signs.value.widened(I64).total())
        for name, count in self.counts.items():
            _update(code, FIELDS[name].pointer(code, state), count.value, Value.__add__)
        for name in ("sum", "fingerprint", "multiset", "nonfinite"):
            _update(code, FIELDS[name].pointer(code, state), getattr(self, name).value, Value.__add__)
        for name, combine in (("minimum", Value.smaller), ("maximum", Value.larger), ("smallest", Value.smaller)):
            value = getattr(self, name).value.widened(F64)
            _update(code, FIELDS[name].pointer(code, state), value, combine)


def blocks_function(module: ir.Module, dtype: FloatDtype) -> ir.Function:
    """Define `void (x, first, stop, block, state)`: accumulate whole blocks.

    Elements `first` to `stop` of `x`, a multiple of 64 of them, are block `block` and those after it.
    """
    function = _define(module, f"blocks_{dtype.name}")
    code = Code(function)
    x, first, stop, block, state = code.arguments
    totals = _Totals(code, dtype, wide=True)
    number = code.variable(block)
    with code.loop(first, stop, BLOCK) as start:
        weight, signs = _weight(code, number.value), _signs(code, number.value)
        groups = list(_groups(code, dtype, x, start, weight, signs, state))
        special = _special(groups[0].raw, dtype)
        for group in groups[1:]:
            special = special | _special(group.raw, dtype)
        with code.either(special.any(), likely=False) as (yes, no):
            with yes:
                _block(totals, dtype, groups, weight, plain=False)
            with no:
                _block(totals, dtype, groups, weight, plain=True)
        number.value = number.value + 1
    totals.add_to(state)
    code.finish()
    return function


def elements_function(module: ir.Module, dtype: FloatDtype) -> ir.Function:
    """Define `void (x, first, stop, index, state)`: accumulate part of one block, element by element.

    The element `first` of `x` has the global index `index`; none of them lies in another block.
    """
    function = _define(module, f"elements_{dtype.name}")
    code = Code(function)
    x, first, stop, index, state = code.arguments
    totals = _Totals(code, dtype, wide=False)
    block = index >> 6
    weight, signs = _weight(code, block), _signs(code, block)
    lane_weights = _lane_table(module)
    with code.loop(first, stop, 1) as here:
        lane = (index + (here - first)) & 63
        group = _Group(
            raw=code.load(code.at(x, here, dtype.stored), dtype.stored),
            lane_weights=(code.load(code.at(Value(code, lane_weights), lane, I64), I64),),
            negated=((signs >> lane) & 1).equals(1),
            buckets=FIELDS["sketch"].pointer(code, state, lane + (weight >> 58)),
        )
        _block(totals, dtype, [group], weight, plain=False)
    totals.add_to(state)
    code.finish()
    return function


def _define(module: ir.Module, name: str) -> ir.Function:
    function = ir.Function(module, _SIGNATURE, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    for pointer in (function.args[0], function.args[4]):
        pointer.add_attribute("noalias")
    return function


def _groups(
    code: Code, dtype: FloatDtype, x: Value, start: Value, weight: Value, signs: Value, state: Value
) -> Iterator[_Group]:
    """The vectors of one block."""
    rotated = FIELDS["sketch"].pointer(code, state, weight >> 58)
    for group in range(_GROUPS):
        lanes = hashing.LANE_WEIGHTS[LANES * group : LANES * (group + 1)].tolist()
        parts = (lanes,) if dtype.bits == 64 else (lanes[::2], lanes[1::2])
        mask = (signs >> (LANES * group)).narrowed(ir.IntType(LANES))
        yield _Group(
            raw=code.load(code.at(x, start + LANES * group, dtype.stored), vector(dtype.stored)),
            lane_weights=tuple(code.constants(I64, part) for part in parts),
            negated=Value(code, code.builder.bitcast(mask.ir, vector(ir.IntType(1)))),
            buckets=code.at(rotated, LANES * group, F64),
        )


def _block(totals: _Totals, dtype: FloatDtype, groups: list[_Group], weight: Value, *, plain: bool) -> None:
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
            _add(totals.signs, bits >> (dtype.bits - 1))  # 32-bit lanes do not overflow within a chunk
        _extremes(totals, finite, value, dtype, bits, plain=plain)
        long = finite.widened(F64)
        sums.append(long)
        signed = group.negated.choose(-long, long)
        code.store(group.buckets, code.load(group.buckets, signed.type) + signed)

        folded = bits ^ (bits >> 32) if dtype.bits == 64 else bits
        term = _dot(folded, group.lane_weights)
        weighted = term if weighted is None else weighted + term
        _add(totals.multiset, _multiset_hash(folded, wide=dtype.bits == 64))
        if not plain:
            term = _dot(_kind(bits, dtype), group.lane_weights)
            spots = term if spots is None else spots + term
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    _add(totals.sum, sums[0])
    assert weighted is not None
    _add(totals.fingerprint, weighted * weight)
    if spots is not None:
        _add(totals.nonfinite, spots * weight)


def _count_specials(totals: _Totals, dtype: FloatDtype, bits: Value, value: Value) -> Value:
    """Count what is not a normal number; returns the values with zero in place of NaN and infinities."""
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
        _add(totals.counts[name], mask.count())
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
    """Mask of what is not a normal number, in one comparison."""
    return (raw & dtype.magnitude_mask) - dtype.smallest_normal >= dtype.infinity - dtype.smallest_normal


def _kind(bits: Value, dtype: FloatDtype) -> Value:
    """1 for NaN, 2 for +inf, 3 for -inf, else 0."""
    code = bits.code
    size = bits & dtype.magnitude_mask
    signed = (bits & (dtype.magnitude_mask + 1)) > 0
    infinite = size.equals(dtype.infinity).choose(signed.choose(code.like(bits, 3), 2), code.like(bits, 0))
    return (size > dtype.infinity).choose(code.like(bits, 1), infinite)


def _words(value: Value) -> tuple[Value, ...]:
    """As 64-bit words: one vector of them, or of 32-bit lanes the even and the odd ones."""
    return value.halves() if value.is_vector and element_of(value.type) == I32 else (value.widened(I64),)


def _dot(value: Value, weights: tuple[Value, ...]) -> Value:
    """Products modulo 2^64 of words and weights, those of an even and the next odd lane added."""
    products = [word * weight for word, weight in zip(_words(value), weights, strict=True)]
    return products[0] if len(products) == 1 else products[0] + products[1]


def _multiset_hash(folded: Value, *, wide: bool) -> Value:
    if wide:
        z = folded * hashing.MIX_1
        return (z ^ (z >> 32)) * hashing.MIX_2
    v = folded * hashing.ODD_32
    return _dot(folded ^ hashing.XOR_32, _words(v ^ (v >> 16)))


def _splitmix64(z: Value) -> Value:
    z = z + hashing.GOLDEN
    z = (z ^ (z >> 30)) * hashing.MIX_1
    z = (z ^ (z >> 27)) * hashing.MIX_2
    return z ^ (z >> 31)


def _weight(code: Code, block: Value) -> Value:
    return _splitmix64(block ^ code.constant(I64, hashing.WEIGHT_SEED)) | 1


def _signs(code: Code, block: Value) -> Value:
    return _splitmix64(block ^ code.constant(I64, hashing.SIGN_SEED))


def _lane_table(module: ir.Module) -> ir.GlobalVariable:
    name = "lane_weights"
    if name not in module.globals:
        kind = ir.ArrayType(I64, BLOCK)
        table = ir.GlobalVariable(module, kind, name)
        table.initializer = ir.Constant(kind, [ir.Constant(I64, int(one)) for one in hashing.LANE_WEIGHTS])
        table.global_constant = True
        table.linkage = "internal"
    return module.globals[name]


def _add(variable: Variable, value: Value) -> None:
    variable.value = variable.value + value


def _update(code: Code, pointer: Value, value: Value, combine: object) -> None:
    assert callable(combine)
    code.store(pointer, combine(code.load(pointer, value.type), value))
