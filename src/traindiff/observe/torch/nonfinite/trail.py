"""Finds the operator that first makes NaN or infinity in a call: it goes back from the end of the call.

The first operator whose output is not finite need not be it: -inf that masks, and NaN that `torch.where` leaves out,
do no harm unless they come out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from traindiff.core.torch_compat.autograd import storage_key
from traindiff.observe.torch.nonfinite.operations import Json
from traindiff.observe.torch.nonfinite.reading import only_masks


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The smallest and the largest absolute value of a floating-point or complex tensor, and its NaN and infinities.

    Attributes:
        smallest: Least absolute value of the finite elements, as float64; NaN where there are none.
        largest: Largest absolute value of the finite elements; NaN where there are none.
        num_nan: Elements that are NaN.
        num_inf: Elements that are infinite.
    """

    smallest: float
    largest: float
    num_nan: int
    num_inf: int

    @property
    def is_finite(self) -> bool:
        """True if all elements are."""
        return not (self.num_nan or self.num_inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A tensor that an operator has made, or the gradient that came back to it.

    Attributes:
        position: Of the operator in the call.
        name: Full name of the operator.
        backward: Whether this is the gradient.
        dtype: In which it was computed.
        contents: What it holds.
        of_infinity: True if an input of the operator holds an infinity on purpose: a mask or a constant.
    """

    position: int
    name: str
    backward: bool
    dtype: torch.dtype
    contents: Contents
    of_infinity: bool = False


def is_inexact(tensor: Tensor) -> bool:
    """True for floating-point and complex tensors: only these can hold NaN or infinity."""
    return tensor.is_floating_point() or tensor.is_complex()


def contents(tensor: Tensor) -> Contents:
    """The contents of a floating-point or complex tensor of any shape, also of an empty one.

    A complex element is NaN or infinite if one of its parts is.
    """
    values = tensor.detach()
    values = values.to(torch.complex128 if values.is_complex() else torch.float64)
    finite = values[values.isfinite()].abs()
    smallest, largest = (float(finite.min()), float(finite.max())) if finite.numel() else (float("nan"),) * 2
    num_nan = int(values.isnan().sum())
    return Contents(
        smallest=smallest, largest=largest, num_nan=num_nan, num_inf=int((~values.isfinite()).sum()) - num_nan
    )  # fmt: skip


def is_finite(tensor: Tensor) -> bool:
    """True if all elements of a tensor are finite; always true for integers."""
    return not is_inexact(tensor) or contents(tensor).is_finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of a NaN or an infinity.

    Attributes:
        made: The tensor in which an operator made it; None if it was in the call's inputs.
        is_mask: True if it is -inf that the code put there on purpose.
    """

    made: Made | None = None
    is_mask: bool = False

    @property
    def position(self) -> int:
        """Position of the operator; -1 if the NaN or infinity was in the call's inputs."""
        return -1 if self.made is None else self.made.position


class Trail:
    """Follows NaN and infinities from operator to operator.

    Attributes:
        given: Slots of the call's inputs that hold NaN or infinity and are not masks.
        first: Tensor of the first operator that made NaN or infinity (masks do not count). It may not reach the output.
    """

    def __init__(self) -> None:
        self._by_storage: dict[int, Source] = {}
        self.given: list[str] = []
        self.first: Made | None = None

    def begin(self, slot: str, tensor: Tensor) -> None:
        """Note what the call is given."""
        if is_finite(tensor):
            return
        is_mask = only_masks(tensor)
        self.given += [] if is_mask else [slot]
        self._by_storage[storage_key(tensor)] = Source(is_mask=is_mask)

    def met(self, tensors: Iterable[Tensor]) -> list[Source]:
        """The sources of NaN and infinities in these tensors, in the order of the operators that made them."""
        found = [self._by_storage.get(storage_key(one)) for one in tensors if not is_finite(one)]
        return sorted({one for one in found if one is not None}, key=lambda one: one.position)

    def follow(self, met: list[Source], made: Made, tensor: Tensor) -> None:
        """Note what an operator has made.

        Args:
            met: What `met` gave for its inputs, before it ran.
            made: What it has made.
            tensor: The same.
        """
        storage = storage_key(tensor)
        is_all_of_it = tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
        if made.contents.is_finite:
            if is_all_of_it:
                self._by_storage.pop(storage, None)
            return
        source = next((one for one in met if not one.is_mask), None)
        if source is None:
            if made.of_infinity and only_masks(tensor):
                source = met[0] if met else Source(made=made, is_mask=True)
            else:
                source = Source(made=made)
                self.first = self.first or made
        known = self._by_storage.get(storage)
        if is_all_of_it or known is None or known.is_mask:
            self._by_storage[storage] = source


def has_infinity(value: Json) -> bool:
    """True if arguments that were written down hold a number that is not finite; their depth is bounded."""
    if isinstance(value, (list, tuple)):
        return any(map(has_infinity, value))
    return isinstance(value, dict) and ("float" in value or has_infinity(value.get("complex")))
