"""Run a captured call again, in its own dtypes or in longer ones, and see what each operator makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from traindiff.taps.nested import tensors
from traindiff.watching.capturing import CapturedCall
from traindiff.watching.operations import Operation, from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Size of a tensor's elements: the least and the largest absolute value, in float64, and what is not finite.

    Attributes:
        smallest: Least absolute value of the finite elements; NaN where there are none.
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
class Rerun:
    """A captured call, run again.

    Attributes:
        dtype: In which everything was computed; None for the call's own dtypes.
        operations: Position and name of each operator that returned floating-point tensors, with their extents.
        outputs: Extents of what the call returned, by slot.
        failed: Why it could not be run to its end; empty where it was.
    """

    dtype: torch.dtype | None
    operations: list[tuple[int, str, list[Extent]]] = field(default_factory=list)
    outputs: dict[str, Extent] = field(default_factory=dict)
    failed: str = ""

    @property
    def first_non_finite(self) -> tuple[int, str] | None:
        """Position and name of the first operator that returned what is not finite; None where none did."""
        found = ((number, name) for number, name, made in self.operations if not all(one.is_finite for one in made))
        return next(found, None)


def rerun(call: CapturedCall, dtype: torch.dtype | None = None) -> Rerun:
    """Run the operators of a call again, on the CPU.

    Args:
        call: The call. Its tensors are not changed.
        dtype: Floating-point dtype in place of all others; None for the call's own.

    Returns:
        What came out. An operator that cannot be run (it is not installed here, or has no kernel for the dtype) ends it,
        and is named in `failed`.
    """
    result = Rerun(dtype=dtype)
    values = _Values(call, dtype)
    failed = ""
    with torch.no_grad():
        for position, operation in enumerate(call.operations):
            try:
                output = values.run(operation)
            except Exception as error:  # noqa: BLE001  whatever an operator raises is its answer
                failed = f"{operation.name} raised {type(error).__name__}: {error}"
                break
            floating = [extent(one) for _, one in tensors(output, "") if one.is_floating_point()]
            if floating:
                result.operations.append((position, operation.name, floating))
    outputs = dict(_outputs(call, values)) if not failed else {}
    return Rerun(dtype=dtype, operations=result.operations, outputs=outputs, failed=failed)


def extent(tensor: Tensor) -> Extent:
    """The extent of a floating-point tensor of any shape, empty ones too."""
    values = tensor.detach().to(torch.float64).abs()
    finite = values[values.isfinite()]
    smallest, largest = (float(finite.min()), float(finite.max())) if finite.numel() else (float("nan"),) * 2
    return Extent(
        smallest=smallest, largest=largest, num_nan=int(values.isnan().sum()), num_inf=int(values.isinf().sum())
    )


def _outputs(call: CapturedCall, values: _Values) -> Iterator[tuple[str, Extent]]:
    for slot, number in call.outputs.items():
        tensor = values[number]
        if tensor.is_floating_point():
            yield slot, extent(tensor)


class _Values:
    """The tensors of a call by their numbers, as far as they have been computed."""

    def __init__(self, call: CapturedCall, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._kept: Mapping[int, Tensor] = call.tensors
        self._found: dict[int, Tensor] = {}

    def __getitem__(self, number: int) -> Tensor:
        if number not in self._found:
            value = self._kept[number].cpu()
            self._found[number] = value.to(self._other(value.dtype), copy=True)
        return self._found[number]

    def run(self, operation: Operation) -> Any:
        """Run an operator; gives back what it returns."""
        namespace, name, overload = operation.name.split(".", 2)
        function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        args = [from_json(one, self.__getitem__, dtype=self._other) for one in operation.args]
        kwargs = {key: from_json(one, self.__getitem__, dtype=self._other) for key, one in operation.kwargs.items()}
        output = function(*args, **kwargs)
        made = [one for _, one in tensors(output, "")]
        if name.startswith(("empty", "new_empty")):
            for tensor in made:
                tensor.zero_()  # what was there before is nobody's
        for tensor, drawn in zip(made, operation.drawn, strict=False):
            tensor.copy_(self[drawn])
        for number, tensor in zip(_numbers(operation.output), made, strict=True):
            self._found[number] = tensor
        return output

    def _other(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype


def _numbers(output: Any) -> Iterator[int]:
    """The numbers of tensors in what an operator returned, in order."""
    if isinstance(output, dict) and "tensor" in output:
        yield output["tensor"]
    elif isinstance(output, list):
        for one in output:
            yield from _numbers(one)
