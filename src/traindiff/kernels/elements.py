"""What a kernel needs of a tensor, whichever framework it is of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """A tensor's elements as NumPy arrays.

    Attributes:
        values: Elements in row-major order, flat; a view of the tensor's memory where NumPy has
            the dtype, float32 for bfloat16 and float8.
        bits: The same, as unsigned integers.
        tiny: Smallest normal number of the dtype; 0 for dtypes without fractions.
    """

    values: NDArray[np.generic]
    bits: NDArray[np.unsignedinteger]
    tiny: float
