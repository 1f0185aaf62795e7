"""The optional parts of an observation: exponents, signs, intervals, a digest, the tensor itself. From NumPy arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.detail import Detail, RawTensor
from traindiff.kernels.elements import Elements
from traindiff.kernels.elementwise import exponents, intervals, packed_signs


def is_wanted(shape: Sequence[int], wanted: Collection[str], bounds: Sequence[float]) -> bool:
    """Whether anything is kept beside the summary, which holds all of a scalar but its MD5."""
    return bool(set(wanted) - {"summary"} or bounds) if len(shape) else "md5" in wanted


def detail_of_elements(
    found: Elements,
    shape: Sequence[int],
    dtype: str,
    wanted: Collection[str],
    *,
    bounds: Sequence[float] = (),
    summary: Any = None,
) -> Detail | None:
    """The wanted parts of a tensor; copies what it keeps.

    Args:
        found: Its elements.
        shape: Its shape.
        dtype: Its dtype, as torch spells it.
        wanted: Some of `traindiff.detail.DETAILS`.
        bounds: Of the intervals in which elements are counted, ascending; none where they are not.
        summary: Of the tensor, where it is known already.

    Returns:
        None where nothing was wanted. Of a scalar, of which the summary holds everything else, there is the MD5 alone.
    """
    if not is_wanted(shape, wanted, bounds):
        return None
    kept: dict[str, RawTensor] = {}
    if "md5" in wanted:
        digest = hashlib.md5(found.bits.data, usedforsecurity=False).digest()
        kept["md5"] = _raw(np.frombuffer(digest, dtype=np.uint8))
    if not len(shape):
        return Detail(tensors=kept)
    if "tensors" in wanted:
        kept["value"] = RawTensor(dtype=dtype, shape=tuple(shape), data=found.bits.tobytes())
    if "signs" in wanted:
        known = isinstance(summary, np.void)  # and not on its way from a device
        signs = packed_signs(
            found.values, may_be_signless=not known or bool(int(summary["zero"]) + int(summary["nan"]))
        )
        kept |= {"positive": _raw(signs.positive), "signless": _raw(signs.signless)}
        if signs.nan.size:
            kept["nan"] = _raw(signs.nan)
    if bounds:
        counts = intervals(found.values, bounds)
        kept["intervals"] = RawTensor(dtype="int64", shape=counts.shape, data=counts.astype("<i8").tobytes())
    counted = exponents(found.values) if "exponents" in wanted and found.tiny else None
    return Detail(exponents=counted, tensors=kept)


def _raw(found: NDArray[np.uint8]) -> RawTensor:
    return RawTensor(dtype="uint8", shape=found.shape, data=found.tobytes())
