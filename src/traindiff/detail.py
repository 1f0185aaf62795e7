"""What may be kept of a tensor beyond its summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

DETAILS = ("summary", "exponents", "signs", "md5", "tensors")
"""Parts that can be recorded; `summary` always is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTensor:
    """A tensor as bytes.

    Attributes:
        dtype: As torch spells it, e.g. `bfloat16`.
        shape: Its shape.
        data: Its elements in row-major order, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """The optional parts of one observation.

    Attributes:
        exponents: Histogram of binary exponents; see `traindiff.kernels.elementwise.exponents`.
        tensors: What goes into a file of its own: `value`; `positive`, `signless` and `nan`; `intervals`; `md5`.
    """

    exponents: NDArray[np.int64] | None = None
    tensors: Mapping[str, RawTensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        return sum(len(tensor.data) for tensor in self.tensors.values()) + 2560 * (self.exponents is not None)
