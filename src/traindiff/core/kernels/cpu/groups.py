"""The elements of a block with the weights and signs of their places, and hashes of their bits."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from traindiff.core.kernels import reference as hashing
from traindiff.core.kernels.cpu.code import Code
from traindiff.core.kernels.cpu.layout import FIELDS, Dtype
from traindiff.core.kernels.cpu.values import F64, I32, I64, LANES, POINTER, Value, element_of, vector
from traindiff.core.kernels.reference import BLOCK

_SIGN = 1 << 63
"""The sign of a float64."""

_SIGNATURE = ir.FunctionType(ir.VoidType(), [POINTER, I64, I64, I64, POINTER])


def function_over_elements(module: ir.Module, name: str) -> Code:
    """Begin `void (x, first, stop, number, state)`, a function inside the module."""
    function = ir.Function(module, _SIGNATURE, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    for pointer in (function.args[0], function.args[4]):
        pointer.add_attribute("noalias")
    return Code(function)


@dataclass(frozen=True, slots=True)
class Group:
    """Elements that are processed together: a vector of LANES in a block, or one element.

    Attributes:
        raw: Bits as they are in memory.
        lane_weights: L(lane) of each element; even and odd lanes separately if words have 32 bits.
        sign_bits: Bits that change the sign of those elements, in float64, that enter the sketch negated.
        buckets: Pointer to the sketch bucket of the first element; the others follow it.
    """

    raw: Value
    lane_weights: tuple[Value, ...]
    sign_bits: Value
    buckets: Value

    def add_to_sketch(self, code: Code, values: Value) -> None:
        """Add the elements to the sketch, given in float64."""
        signed = (values.reinterpreted(I64) ^ self.sign_bits).reinterpreted(F64)
        code.store(self.buckets, code.load(self.buckets, signed.type) + signed)


class Block:
    """A block by its number: 64 consecutive global indices.

    Attributes:
        weight: W(block).
    """

    def __init__(self, code: Code, number: Value) -> None:
        self._code = code
        self.weight = _splitmix64(number ^ code.constant(I64, hashing.WEIGHT_SEED)) | 1
        self._signs = _splitmix64(number ^ code.constant(I64, hashing.SIGN_SEED))

    def groups(self, dtype: Dtype, x: Value, start: Value, state: Value) -> list[Group]:
        """The vectors of the block, which begins with element `start` of `x`."""
        code = self._code
        rotated = FIELDS["sketch"].pointer(code, state, self.weight >> 58)
        found = []
        for first in range(0, BLOCK, LANES):
            lanes = hashing.LANE_WEIGHTS[first : first + LANES].tolist()
            parts = (lanes,) if dtype.bits == 64 else (lanes[::2], lanes[1::2])
            to_front = code.constants(I64, [63 - lane for lane in range(first, first + LANES)])
            found.append(
                Group(
                    raw=code.load(code.at(x, start + first, dtype.stored), vector(dtype.stored)),
                    lane_weights=tuple(code.constants(I64, part) for part in parts),
                    sign_bits=(code.spread(self._signs) << to_front) & _SIGN,
                    buckets=code.at(rotated, first, F64),
                )
            )
        return found

    def element(self, dtype: Dtype, x: Value, here: Value, lane: Value, state: Value) -> Group:
        """The element of `x` with the index `here`, which is at position `lane` of the block."""
        code = self._code
        lane_weights = Value(code, _lane_table(code.function.module))
        return Group(
            raw=code.load(code.at(x, here, dtype.stored), dtype.stored),
            lane_weights=(code.load(code.at(lane_weights, lane, I64), I64),),
            sign_bits=(self._signs >> lane) << 63,
            buckets=FIELDS["sketch"].pointer(code, state, lane + (self.weight >> 58)),
        )


def folded(bits: Value, dtype: Dtype) -> Value:
    """The bits that enter fingerprints."""
    return bits ^ (bits >> 32) if dtype.bits == 64 else bits


def dot(value: Value, weights: tuple[Value, ...]) -> Value:
    """Products modulo 2^64 of words and weights, those of an even and the next odd lane added."""
    products = [word * weight for word, weight in zip(_words(value), weights, strict=True)]
    return products[0] if len(products) == 1 else products[0] + products[1]


def multiset_hash(bits: Value, dtype: Dtype) -> Value:
    """The hash h of folded bits, those of an even and the next odd lane added."""
    if dtype.bits == 64:
        z = bits * hashing.MIX_1
        return (z ^ (z >> 32)) * hashing.MIX_2
    v = bits * hashing.ODD_32
    return dot(bits ^ hashing.XOR_32, _words(v ^ (v >> 16)))


def hash_type(dtype: Dtype, *, wide: bool) -> ir.Type:
    """Type of the results of `dot` and `multiset_hash`, for a vector or for one element."""
    return ir.VectorType(I64, LANES * dtype.word.width // 64) if wide else I64


def _words(value: Value) -> tuple[Value, ...]:
    """As 64-bit words: one vector of them, or of 32-bit lanes the even and the odd ones."""
    return value.halves() if value.is_vector and element_of(value.type) == I32 else (value.widened(I64),)


def _splitmix64(z: Value) -> Value:
    z = z + hashing.GOLDEN
    z = (z ^ (z >> 30)) * hashing.MIX_1
    z = (z ^ (z >> 27)) * hashing.MIX_2
    return z ^ (z >> 31)


def _lane_table(module: ir.Module) -> ir.GlobalVariable:
    name = "lane_weights"
    if name not in module.globals:
        kind = ir.ArrayType(I64, BLOCK)
        table = ir.GlobalVariable(module, kind, name)
        table.initializer = ir.Constant(kind, [ir.Constant(I64, int(one)) for one in hashing.LANE_WEIGHTS])
        table.global_constant = True
        table.linkage = "internal"
    return module.globals[name]
