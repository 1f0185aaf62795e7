"""Take the optional parts of an observation from a tensor."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from traindiff.detail import Detail, RawTensor
from traindiff.kernels import details, torch_arrays


def detail_of(tensor: Tensor, wanted: frozenset[str]) -> Detail | None:
    """The wanted parts of a tensor that a summary could be made of; copies what it keeps.

    Args:
        tensor: Any tensor that `traindiff.kernels.summarise` takes.
        wanted: Some of `traindiff.detail.DETAILS`.

    Returns:
        None where nothing was wanted, or for a scalar, of which the summary holds everything.
    """
    if not tensor.dim() or wanted <= {"summary"}:
        return None
    real = torch_arrays.as_real(tensor)
    found = torch_arrays.elements(real)
    kept: dict[str, RawTensor] = {}
    if "tensors" in wanted:
        dtype = torch_arrays.dtype_name(real)
        kept["value"] = RawTensor(dtype=dtype, shape=tuple(real.shape), data=found.bits.tobytes())
    if "signs" in wanted:
        positive, signless = details.packed_signs(found.values)
        kept |= {"positive": _packed(positive), "signless": _packed(signless)}
    exponents = details.exponents(found.values) if "exponents" in wanted and found.tiny else None
    return Detail(exponents=exponents, tensors=kept)


def _packed(bits: NDArray[np.uint8]) -> RawTensor:
    return RawTensor(dtype="uint8", shape=bits.shape, data=bits.tobytes())
