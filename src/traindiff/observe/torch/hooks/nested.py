"""Find and exchange the tensors in whatever a module takes or returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, float64, strided, tensor

from traindiff.observe.common.containers import mapped, slots_of

MOST_BYTES = 2**30
"""Memory that the dense form of a gradient may take while it is summarized; a larger gradient is not observed."""


def as_dense(gradient: Tensor) -> Tensor:
    """The dense tensor that a sparse gradient stands for; any other tensor itself.

    Rows that appear several times are added up. Copies; the gradient itself is not changed.

    Args:
        gradient: A parameter's gradient. If its dense form is larger than `MOST_BYTES`, it is returned as it is.
    """
    if gradient.is_nested or gradient.layout == strided or gradient.numel() * gradient.itemsize > MOST_BYTES:
        return gradient
    return gradient.detach().to_dense()


def as_tensor(number: float | Tensor) -> Tensor:
    """A tensor without axes: a number in float64 on the CPU; a tensor with one element on its device, detached."""
    if isinstance(number, Tensor):
        return number.detach().reshape(())
    return tensor(float(number), dtype=float64, device="cpu")


def tensors(value: Any, slot: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in `value` with its slot; see `slots_of`."""
    return slots_of(value, slot, Tensor)


def replaced(value: Any, by_id: Mapping[int, Tensor]) -> Any:
    """`value` with other tensors in it, in containers of the same types; `value` itself if nothing changes.

    Args:
        value: Anything in which `tensors` finds tensors.
        by_id: The new tensors by the ids of those whose places they take.
    """
    return mapped(value, Tensor, lambda one: by_id.get(id(one), one))
