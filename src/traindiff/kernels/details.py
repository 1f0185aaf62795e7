"""The optional parts of an observation of a tensor of torch. On the CPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from traindiff.detail import Detail
from traindiff.kernels import torch_arrays
from traindiff.kernels.element_details import detail_of_elements, is_wanted


def detail_of(
    tensor: Tensor, wanted: Collection[str], *, bounds: Sequence[float] = (), summary: Any = None
) -> Detail | None:
    """The wanted parts of a tensor that a summary could be made of; see `detail_of_elements`.

    Args:
        tensor: Any tensor that `traindiff.kernels.summarise` takes.
        wanted: Some of `traindiff.detail.DETAILS`.
        bounds: Of the intervals in which elements are counted, ascending; none where they are not.
        summary: Of the tensor, where it is known already.

    Returns:
        None where nothing was wanted.
    """
    if not (set(wanted) - {"summary"} or bounds):
        return None
    real = torch_arrays.as_real(tensor)
    if not is_wanted(real.shape, wanted, bounds):
        return None
    found, dtype = torch_arrays.elements(real), torch_arrays.dtype_name(real)
    return detail_of_elements(found, tuple(real.shape), dtype, wanted, bounds=bounds, summary=summary)
