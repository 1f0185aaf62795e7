"""Numbers, as the tensors that a sink takes."""

from __future__ import annotations

from torch import Tensor, float64, tensor


def as_tensor(number: float | Tensor) -> Tensor:
    """A tensor without axes: float64 on the CPU, or the given tensor with one element, where it is, detached."""
    if isinstance(number, Tensor):
        return number.detach().reshape(())
    return tensor(float(number), dtype=float64, device="cpu")
