"""Run a captured call again, in its own dtypes or in longer ones, and see what each operator makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from traindiff.core.torch_compat.operators import operator_schema, without_onednn
from traindiff.observe.torch.hooks.nested import tensors
from traindiff.observe.torch.nonfinite.allowed_operators import allowed_operator, bound
from traindiff.observe.torch.nonfinite.argument_checks import check_bounds
from traindiff.observe.torch.nonfinite.capturing import CapturedCall
from traindiff.observe.torch.nonfinite.operations import Operation, from_json, numbers_of
from traindiff.observe.torch.nonfinite.trail import (
    Contents,
    Made,
    Source,
    Trail,
    contents,
    has_infinity,
    is_finite,
    is_inexact,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """A captured call, run again.

    Attributes:
        dtype: In which everything was computed; None for the call's own dtypes.
        made: In the order in which they were made: forward, then backward.
        results: What came out of it, by slot: outputs, or the gradients of inputs and weights.
        first_non_finite: The first tensor that is not finite, and that makes the results so; None where they are
            finite, or where `given` makes them so.
        given: Slots of what the call was given that is not finite, no mask, and makes the results so.
        failed: Why it could not be run to its end; empty where it was.
    """

    dtype: torch.dtype | None
    made: list[Made]
    results: dict[str, Contents]
    first_non_finite: Made | None
    given: list[str]
    failed: str


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
    made: list[Made] = []
    results: dict[str, Contents] = {}
    values, trail = _Values(call, dtype, torch.device(device)), Trail()
    incoming = {f"grad {slot}": number for slot, number in call.gradients.items()}
    for slot, number in (*call.inputs.items(), *call.weights.items(), *incoming.items()):
        trail.begin(slot, values[number])
    failed = ""
    gradients: list[Made] = []
    with torch.set_grad_enabled(bool(call.gradients)), without_onednn():
        for position, operation in enumerate(call.operations):
            try:
                met = trail.met(values.given(operation))
                output = values.run(operation)
            except Exception as error:  # noqa: BLE001  whatever an operator raises is its answer
                failed = f"{operation.name} raised {type(error).__name__}: {error}"
                break
            for one in filter(is_inexact, (one for _, one in tensors(output, ""))):
                of_infinity = bool(met) or values.has_constant(operation)
                made.append(_made(position, operation.name, one, of_infinity=of_infinity))
                trail.follow(met, made[-1], one)
                if one.requires_grad:
                    one.register_hook(partial(_keep, gradients, position, operation.name))
        if call.gradients and not failed:
            failed = _run_backward(call, values)
    if not failed:
        made += gradients
        if call.gradients:
            results = {
                f"grad {slot}": contents(gradient)
                for slot, number in (*call.inputs.items(), *call.weights.items())
                if (gradient := values.leaf_gradient(number)) is not None
            }
        else:
            outputs = ((slot, values[number]) for slot, number in call.outputs.items())
            results = {slot: contents(one) for slot, one in outputs if is_inexact(one)}
    ends = [] if failed else trail.met(values[number] for number in (*call.outputs.values(), *call.weights.values()))
    first, given = _source(made, trail, ends, failed=bool(failed), backward=bool(call.gradients))
    return Rerun(dtype=dtype, made=made, results=results, first_non_finite=first, given=given, failed=failed)


def _source(
    made: list[Made], trail: Trail, ends: list[Source], *, failed: bool, backward: bool
) -> tuple[Made | None, list[str]]:
    """The tensor in which the NaN or infinities of the results begin, or None, and the call's inputs that had them."""
    found = next((one for one in ends if not one.is_mask), None)
    if found is not None and found.made is not None:
        return found.made, []
    if found is not None or (trail.given and (failed or backward)):
        return None, trail.given
    if failed:
        return trail.first, []
    if backward:
        first = next((one for one in made if one.backward and not one.contents.is_finite), None)
        if first is not None:
            return first, []
    return next((one.made for one in ends), None), []


def _made(position: int, name: str, tensor: Tensor, *, backward: bool = False, of_infinity: bool = False) -> Made:
    return Made(
        position=position, name=name, backward=backward, dtype=tensor.dtype, contents=contents(tensor),
        of_infinity=of_infinity,
    )  # fmt: skip


def _keep(gradients: list[Made], position: int, name: str, gradient: Tensor | None) -> None:
    if gradient is not None:  # autograd passes the operator, for another of its outputs
        gradients.append(_made(position, name, gradient, backward=True))


def _run_backward(call: CapturedCall, values: _Values) -> str:
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
    return ""


class _Values:
    """The tensors of a call by their numbers, as far as they have been computed."""

    def __init__(self, call: CapturedCall, dtype: torch.dtype | None, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._kept: Mapping[int, Tensor] = call.tensors
        self._trained = frozenset(call.trained)
        named = (call.inputs, call.weights, call.gradients)
        self._constants = call.tensors.keys() - {number for numbers in named for number in numbers.values()}
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

    def given(self, operation: Operation) -> list[Tensor]:
        """The tensors among the arguments of an operator."""
        return [self[number] for number in numbers_of(operation.arguments)]

    def has_constant(self, operation: Operation) -> bool:
        """True if a constant that is not finite is among the arguments of an operator: a number or a tensor."""
        constants = (self._kept[number] for number in numbers_of(operation.arguments) if number in self._constants)
        return has_infinity(operation.arguments) or not all(map(is_finite, constants))

    def leaf_gradient(self, number: int) -> Tensor | None:
        """The gradient of an input or weight."""
        leaf = self._leaves.get(number)
        return None if leaf is None else leaf.grad

    def run(self, operation: Operation) -> Any:
        """Run an operator; gives back what it returns."""
        operator, name = allowed_operator(operation.name), operation.name.split(".")[1]
        convert = partial(from_json, tensor=self.__getitem__, dtype=self._other, device=self._device)
        given = {one: convert(value) for one, value in bound(operation, operator_schema(operator).arguments).items()}
        check_bounds(name, {one.name: value for one, value in given.items()})
        output = operator(
            *(value for one, value in given.items() if not one.kwarg_only),
            **{one.name: value for one, value in given.items() if one.kwarg_only},
        )
        made = [one for _, one in tensors(output, "")]
        with torch.no_grad():
            if name.startswith(("empty", "new_empty")):
                for tensor in made:
                    tensor.zero_()  # what was there before is nobody's
            for tensor, drawn in zip(made, operation.drawn, strict=False):
                tensor.copy_(self[drawn])
        for number, tensor in zip(numbers_of(operation.output), made, strict=True):
            self._found[number] = tensor
        return output

    def _other(self, dtype: torch.dtype) -> torch.dtype:
        if self._dtype is None or not (dtype.is_floating_point or dtype.is_complex):
            return dtype
        return self._dtype.to_complex() if dtype.is_complex else self._dtype
