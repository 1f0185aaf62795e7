"""Run an operator again: one element that differs, and no other, was not computed, or kept, as it should have been."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_LEAST = 16.0
"""Smallest difference, in roundings of the element. Kernels that add up in another order change many elements, or one
by a rounding or two."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_odd_element(returned: Iterable[Tensor], again: Callable[[], Iterable[Tensor]]) -> bool:
    """True if one element of one tensor is another number than when the operator is run again, twice with equal bits.

    Args:
        returned: What the operator returned. Only dense tensors on the CPU are looked at.
        again: Runs it with the same inputs, and gives the tensors in the same order.
    """
    first = list(returned)
    if not all(_is_read(one) for one in first):
        return False
    second = list(again())
    different = [(one, other) for one, other in zip(first, second, strict=True) if not _same(one, other)]
    if len(different) != 1 or not _one_is_far(*different[0]):
        return False
    return all(map(_same, second, again()))


def _is_read(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided and (
        tensor.is_floating_point()
    )  # fmt: skip


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _one_is_far(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    places = (_bits(one) != _bits(other)).nonzero()
    if len(places) != 1:
        return False
    numbers: Any = [float(tensor.detach()[tuple(places[0])]) for tensor in (one, other)]
    rounding = torch.finfo(one.dtype).eps / 2.0 * max(map(abs, numbers))
    return not abs(numbers[0] - numbers[1]) < _LEAST * rounding
