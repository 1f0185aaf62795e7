"""Gradients of embeddings that hold only the rows that were looked up."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_BYTES = 2**30
"""Memory that the dense form may take while it is summarised; a larger gradient is not observed."""


def as_dense(gradient: Tensor) -> Tensor:
    """The dense tensor that a sparse gradient stands for; any other tensor itself.

    Rows that appear several times are added up. Copies; the gradient itself is not changed.

    Args:
        gradient: Of a parameter. One whose dense form is larger than `MOST_BYTES` comes back as it is.
    """
    if gradient.is_nested or gradient.layout == torch.strided or gradient.numel() * gradient.itemsize > MOST_BYTES:
        return gradient
    return gradient.detach().to_dense()
