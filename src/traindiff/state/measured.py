"""One pass over the tensors of a checkpoint: a summary of each, in its own dtype and rounded to shorter ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.kernels import summarize_array
from traindiff.core.kernels.element_details import Elements
from traindiff.core.shards import Shard
from traindiff.core.summary import SMALLEST_NORMAL, empty, merge
from traindiff.state.dtypes import ITEM_BYTES, TOO_LARGE, Bits, bits_type, decoded, is_float, rounded, shorter
from traindiff.state.stored import SlabBuffers, StoredTensor

MOST_THREADS = 8

Progress = Callable[[int], None]
"""Is told how many more bytes have been read."""

_AS_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A tensor and its summaries.

    Attributes:
        tensor: The tensor.
        summaries: By dtype: of its elements, rounded to that dtype. None where only its bits were compared.
    """

    tensor: StoredTensor
    summaries: Mapping[str, Any]

    @property
    def own(self) -> Any:
        """The summary in its own dtype."""
        return self.summaries[self.tensor.dtype]

    @property
    def is_zero(self) -> bool:
        """True if all elements are zero."""
        words = ITEM_BYTES[self.tensor.dtype] // bits_type(self.tensor.dtype).itemsize
        return self.tensor.size > 0 and int(self.own["zero"]) == self.tensor.size * words

    @property
    def is_constant(self) -> bool:
        """True if all elements are the same number, so that it could be any tensor of its shape."""
        own = self.own
        if self.tensor.size == 0:
            return True
        if self.tensor.dtype.startswith("complex") and self.tensor.is_readable:
            return _has_one_element(self.tensor)
        return float(own["minimum"]) == float(own["maximum"]) and not int(own["nan"])


def _has_one_element(tensor: StoredTensor) -> bool:
    """True if all elements have the bits of the first one: summaries of complex numbers have no extremes."""
    first = tensor.slab(0, 1)[: ITEM_BYTES[tensor.dtype] // bits_type(tensor.dtype).itemsize].copy()
    return all(bool((tensor.slab(*slab).reshape(-1, first.size) == first).all()) for slab in tensor.slabs)


def measure(
    tensors: Sequence[tuple[StoredTensor, Sequence[str]]], progress: Progress = lambda _: None
) -> list[Measured]:
    """Summaries of tensors. Memory holds one slab per thread.

    Args:
        tensors: Each with the shorter dtypes to which it is to be rounded as well.
        progress: Is told of every slab.

    Raises:
        CheckpointError: A file has ended.
    """
    pool = ThreadPoolExecutor(max_workers=min(MOST_THREADS, os.cpu_count() or 1))
    buffers = SlabBuffers(1)
    try:
        parts = [
            [pool.submit(_of_slab, tensor, (tensor.dtype, *others), buffers, *slab) for slab in tensor.slabs]
            if tensor.is_readable
            else []
            for tensor, others in tensors
        ]
        found = []
        for (tensor, others), slabs in zip(tensors, parts, strict=True):
            made: list[list[Any]] = []
            for slab in slabs:
                made.append(slab.result())
                progress(tensor.num_bytes // len(slabs))
            dtypes = (tensor.dtype, *others)
            of_each = [_merged([one[number] for one in made]) for number in range(len(dtypes))]
            summaries = (
                dict(zip(dtypes, of_each, strict=True)) if tensor.is_readable else {tensor.dtype: tensor.summary}
            )
            found.append(Measured(tensor=tensor, summaries=summaries))
        return found
    finally:
        pool.shutdown(cancel_futures=True)


def _merged(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else merge(parts) if parts else empty(1)[0]


def _of_slab(
    tensor: StoredTensor, dtypes: Sequence[str], buffers: SlabBuffers, first: int, end: int
) -> list[Any]:  # fmt: skip
    bits = tensor.slab(first, end, *buffers.of_thread())
    inner = prod(tensor.shape[1:])
    shard = Shard(shape=(bits.size,), global_shape=tensor.shape, offset=(first * inner,))
    if tensor.dtype == "complex128":
        shard = Shard(shape=(bits.size,), global_shape=(*tensor.shape, 16), offset=(first * inner * 16,))
    elif len(tensor.shape) == 1:
        shard = Shard(shape=(end - first,), global_shape=tensor.shape, offset=(first,))
    return [summary_of(in_dtype(bits, tensor.dtype, dtype), dtype, shard) for dtype in dtypes]


def in_dtype(bits: Bits, own: str, wanted: str) -> Bits:
    """The bits of elements after rounding them from their own dtype to a shorter one."""
    return bits if own == wanted else rounded(decoded(bits, own), wanted)


def summary_of(bits: Bits, dtype: str, shard: Shard) -> Any:
    """The summary of elements given by their bits; extremes and sums of dtypes without numbers mean nothing."""
    if not is_float(dtype):
        known = dtype if dtype in ("bool", "uint8", "int8", "int16", "int32", "int64") else ""
        name = known or _AS_INTEGERS[bits.itemsize]
        return summarize_array(bits, shard, partial(_integers, bits), name)
    if bits.itemsize > 1:
        return summarize_array(bits, shard, partial(_floats, bits, dtype), dtype)
    values = decoded(bits, dtype)
    summary = summarize_array(values, shard, partial(_floats, values.view(np.uint32), "float32"), "float32")
    of_bits = summarize_array(bits, shard, partial(_integers, bits), "uint8")
    for name in ("fingerprint", "multiset"):
        summary[name] = of_bits[name]
    return summary


def _integers(bits: Bits) -> Elements:
    return Elements(values=bits, bits=bits, tiny=0.0)


def _floats(bits: Bits, dtype: str) -> Elements:
    values: NDArray[Any] = decoded(bits, dtype)
    return Elements(values=values, bits=bits, tiny=SMALLEST_NORMAL[dtype])


def common_dtype(baseline: str, candidate: str) -> str | None:
    """The dtype in which the bits of two tensors can be compared: the shorter one, if the other holds its numbers."""
    if baseline == candidate or candidate in shorter(baseline):
        return candidate
    return baseline if baseline in shorter(candidate) else None


def same_bits(baseline: Measured, candidate: Measured) -> bool:
    """True if two tensors have the same shape, and the same bits in their common dtype."""
    if baseline.tensor.shape != candidate.tensor.shape:
        return False
    dtype = common_dtype(baseline.tensor.dtype, candidate.tensor.dtype)
    if dtype is None or dtype not in baseline.summaries or dtype not in candidate.summaries:
        return False
    first, second = baseline.summaries[dtype], candidate.summaries[dtype]
    return all(int(first[name]) == int(second[name]) for name in ("fingerprint", "multiset", "count"))


def overflows(tensors: Sequence[Measured], dtype: str) -> bool:
    """True if some finite elements are too large for a dtype, as extremes of the summaries tell."""
    limit = TOO_LARGE.get(dtype, np.inf)
    return any(
        max(abs(float(one.own[name])) for name in ("minimum", "maximum")) >= limit
        for one in tensors
        if one.tensor.dtype != dtype and int(one.own["count"]) and np.isfinite(float(one.own["minimum"]))
    )


def by_own_name(tensors: Mapping[str, Measured]) -> dict[str, Measured]:
    """Tensors by the names that they have in their checkpoint, in place of those by which they are paired."""
    return {one.tensor.name: one for one in tensors.values()}


def keys_by_own_name(tensors: Mapping[str, Measured]) -> dict[str, str]:
    """The names by which tensors are paired, by their own names."""
    return {one.tensor.name: key for key, one in tensors.items()}
