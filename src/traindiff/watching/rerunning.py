"""Run a captured call again, in its own dtypes or in longer ones, and see what each operator makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from traindiff.taps._torch_compat import without_onednn
from traindiff.taps.nested import tensors
from traindiff.watching.allowed_operators import allowed_operator, bound
from traindiff.watching.argument_checks import check_bounds
from traindiff.watching.capturing import CapturedCall
from traindiff.watching.operations import Operation, from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a floating-point tensor holds: the least and the largest absolute value, and what is not finite.

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
    """A floating-point tensor that an operator has made, or the gradient that came back to it.

    Attributes:
        position: Of the operator in the call.
        name: Full name of the operator.
        backward: Whether this is the gradient.
        dtype: In which it was computed.
        contents: What it holds.
    """

    position: int
    name: str
    backward: bool
    dtype: torch.dtype
    contents: Contents


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """A captured call, run again.

    Attributes:
        dtype: In which everything was computed; None for the call's own dtypes.
        made: In the order in which they were made: forward, then backward.
        inputs: What the call was given, by slot, weights and incoming gradients too.
        results: What came out of it, by slot: outputs, or the gradients of inputs and weights.
        failed: Why it could not be run to its end; empty where it was.
    """

    dtype: torch.dtype | None
    made: list[Made] = field(default_factory=list)
    inputs: dict[str, Contents] = field(default_factory=dict)
    results: dict[str, Contents] = field(default_factory=dict)
    failed: str = ""

    @property
    def first_non_finite(self) -> Made | None:
        """The first tensor that is not finite; None where there is none."""
        return next((one for one in self.made if not one.contents.is_finite), None)


def rerun(call: CapturedCall, dtype: torch.dtype | None = None, device: str = "cpu") -> Rerun:
    """Run the operators of a call again, and its backward pass where gradients came back to it.

    Args:
        call: The call. Its tensors are not changed.
        dtype: Floating-point dtype in place of all others; None for the call's own.
        device: Where.

    Returns:
        What came out. An operator that cannot be run (it is not installed here, or has no kernel for the dtype) ends
        it, and is named in `failed`.
    """
    result = Rerun(dtype=dtype)
    values = _Values(call, dtype, torch.device(device))
    for names in (call.inputs, call.weights, {f"grad {slot}": number for slot, number in call.gradients.items()}):
        result.inputs.update(
            (slot, contents(values[number])) for slot, number in names.items() if values.is_float(number)
        )
    failed = ""
    forward: AbstractContextManager[object] = torch.enable_grad() if call.gradients else torch.no_grad()
    gradients: list[tuple[int, str, Tensor]] = []
    with forward, without_onednn():
        for position, operation in enumerate(call.operations):
            try:
                output = values.run(operation)
            except Exception as error:  # noqa: BLE001  whatever an operator raises is its answer
                failed = f"{operation.name} raised {type(error).__name__}: {error}"
                break
            for _, one in tensors(output, ""):
                if one.is_floating_point():
                    result.made.append(_made(position, operation.name, one, backward=False))
                    if one.requires_grad:
                        one.register_hook(partial(_keep, gradients, position, operation.name))
        if not failed and call.gradients:
            failed = _run_backward(call, values, gradients, result)
        elif not failed:
            result.results.update(
                (slot, contents(values[number])) for slot, number in call.outputs.items() if values.is_float(number)
            )
    return Rerun(dtype=dtype, made=result.made, inputs=result.inputs, results=result.results, failed=failed)


def contents(tensor: Tensor) -> Contents:
    """What a floating-point tensor of any shape holds, empty ones too."""
    values = tensor.detach().to(torch.float64).abs()
    finite = values[values.isfinite()]
    smallest, largest = (float(finite.min()), float(finite.max())) if finite.numel() else (float("nan"),) * 2
    return Contents(
        smallest=smallest, largest=largest, num_nan=int(values.isnan().sum()), num_inf=int(values.isinf().sum())
    )


def _made(position: int, name: str, tensor: Tensor, *, backward: bool) -> Made:
    return Made(position=position, name=name, backward=backward, dtype=tensor.dtype, contents=contents(tensor))


def _keep(gradients: list[tuple[int, str, Tensor]], position: int, name: str, gradient: Tensor | None) -> None:
    if gradient is not None:  # autograd passes the operator, for another of its outputs
        gradients.append((position, name, gradient.detach().clone()))


def _run_backward(call: CapturedCall, values: _Values, gradients: list[tuple[int, str, Tensor]], result: Rerun) -> str:
    """Run the backward pass; gives why it failed, empty where it did not."""
    slots = [slot for slot in call.gradients if slot in call.outputs and values[call.outputs[slot]].requires_grad]
    if not slots:
        return "no output from which a gradient could come back was made by operators that have one"
    outputs = [values[call.outputs[slot]] for slot in slots]
    try:
        given = [values[call.gradients[slot]].detach().to(one.dtype) for slot, one in zip(slots, outputs, strict=True)]
        torch.autograd.backward(outputs, given)
    except Exception as error:  # noqa: BLE001  whatever an operator raises is its answer
        return f"its backward pass raised {type(error).__name__}: {error}"
    result.made.extend(_made(position, name, one, backward=True) for position, name, one in gradients)
    for names in (call.inputs, call.weights):
        for slot, number in names.items():
            gradient = values.leaf_gradient(number)
            if gradient is not None:
                result.results[f"grad {slot}"] = contents(gradient)
    return ""


class _Values:
    """The tensors of a call by their numbers, as far as they have been computed."""

    def __init__(self, call: CapturedCall, dtype: torch.dtype | None, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._kept: Mapping[int, Tensor] = call.tensors
        self._trained = frozenset(call.trained)
        self._leaves: dict[int, Tensor] = {}
        self._found: dict[int, Tensor] = {}

    def __getitem__(self, number: int) -> Tensor:
        if number not in self._found:
            value = self._kept[number]
            value = value.to(device=self._device, dtype=self._other(value.dtype), copy=True)
            if number in self._trained:
                self._leaves[number] = value.requires_grad_()
                value = value.clone()  # operators may write into it, as they may not into a leaf
            self._found[number] = value
        return self._found[number]

    def is_float(self, number: int) -> bool:
        """Whether a tensor has floating-point elements."""
        return self[number].is_floating_point()

    def leaf_gradient(self, number: int) -> Tensor | None:
        """The gradient of an input or weight."""
        leaf = self._leaves.get(number)
        return None if leaf is None else leaf.grad

    def run(self, operation: Operation) -> Any:
        """Run an operator; gives back what it returns."""
        operator, name = allowed_operator(operation.name), operation.name.split(".")[1]
        convert = partial(from_json, tensor=self.__getitem__, dtype=self._other, device=self._device)
        given = {one: convert(value) for one, value in bound(operation, operator._schema.arguments).items()}
        check_bounds(name, {one.name: value for one, value in given.items()})
        output = operator(
            *(value for one, value in given.items() if not one.kwarg_only),
            **{one.name: value for one, value in given.items() if one.kwarg_only},
        )
        made = [one for _, one in tensors(output, "")]
        with torch.no_grad() if operation.drawn or name.startswith(("empty", "new_empty")) else nullcontext():
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
