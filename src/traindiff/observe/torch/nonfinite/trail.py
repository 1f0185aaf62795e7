"""Where in a call what is not finite comes from: from its end back to the first operator that makes it.

The first operator whose output is not finite need not be it: -inf that masks, and NaN that `torch.where` leaves out,
do no harm unless they come out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from traindiff.core.torch_compat.execution import storage_key
from traindiff.observe.torch.nonfinite.operations import Json
from traindiff.observe.torch.nonfinite.reading import only_masks


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a floating-point or complex tensor holds: the least and the largest absolute value, and what is not finite.

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
        """Whether all elements are."""
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
        of_infinity: Whether the operator was given an infinity that somebody has put there: a mask or a constant.
    """

    position: int
    name: str
    backward: bool
    dtype: torch.dtype
    contents: Contents
    of_infinity: bool = False


def is_inexact(tensor: Tensor) -> bool:
    """Whether a tensor has floating-point or complex elements, which alone can be NaN or infinite."""
    return tensor.is_floating_point() or tensor.is_complex()


def contents(tensor: Tensor) -> Contents:
    """What a floating-point or complex tensor of any shape holds, empty ones too.

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
    """Whether all elements of a tensor are; those of integers always."""
    return not is_inexact(tensor) or contents(tensor).is_finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where something that is not finite comes from.

    Attributes:
        made: By the operator that has made it; None where the call was given it.
        is_mask: Whether it is -inf that somebody has put there.
    """

    made: Made | None = None
    is_mask: bool = False

    @property
    def position(self) -> int:
        """Of the operator; -1 where the call was given it."""
        return -1 if self.made is None else self.made.position


class Trail:
    """Follows what is not finite from operator to operator.

    Attributes:
        given: Slots of what the call was given that is not finite, and no mask.
        first: What the first operator has made that made what is not finite and no mask, whether it comes out or not.
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
        """Where that comes from which is not finite in these tensors, in the order of the operators that made it."""
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
    """Whether arguments that were written down hold a number that is not finite; their depth is bounded."""
    if isinstance(value, (list, tuple)):
        return any(map(has_infinity, value))
    return isinstance(value, dict) and ("float" in value or has_infinity(value.get("complex")))
