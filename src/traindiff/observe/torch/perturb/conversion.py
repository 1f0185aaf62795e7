"""Convert parameters, buffers, gradients and states of optimizers to a longer dtype, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.core.torch_compat.operators import operator_schema
from traindiff.core.torch_compat.training import buffers_of, modules_in, own_buffers, parameters_in
from traindiff.observe.common.containers import mapped
from traindiff.observe.torch.hooks.nested import tensors

_BITS = {torch.float64: 64, torch.float32: 32, torch.bfloat16: 16, torch.float16: 16}


def is_shorter(dtype: torch.dtype, than: torch.dtype) -> bool:
    """True if `dtype` is a floating-point dtype to be computed in the longer one; float8 is not."""
    return _BITS.get(dtype, 64) < _BITS[than]


def call_cast(
    operator: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dtype_of: Callable[[Tensor, bool], torch.dtype],
) -> Any:
    """Call an operator with cast tensors, and write back to the given tensors.

    Args:
        operator: The operator.
        args: Its positional arguments.
        kwargs: The others.
        dtype_of: The dtype in which the operator gets a floating-point tensor, and whether it writes to it.

    Returns:
        Its result; where that is an argument, the argument that was given.
    """
    written: list[tuple[Tensor, Tensor]] = []

    def cast(argument: Any, *, writes: bool) -> Any:
        def cast_one(one: Tensor) -> Tensor:
            if not one.is_floating_point() or (dtype := dtype_of(one, writes)) == one.dtype:
                return one
            copy = one.to(dtype)
            if writes:
                written.append((copy, one))
            return copy

        return mapped(argument, Tensor, cast_one)

    schema = operator_schema(operator).arguments
    positional = [cast(arg, writes=writes_to(one)) for arg, one in zip(args, schema, strict=False)]
    writes = {one.name: writes_to(one) for one in schema}
    result = operator(*positional, **{name: cast(arg, writes=writes.get(name, False)) for name, arg in kwargs.items()})
    for copy, given in written:
        given.copy_(copy)
    return mapped(result, Tensor, lambda one: next((given for copy, given in written if copy is one), one))


def writes_to(argument: Any) -> bool:
    """True if an operator writes to this argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def is_view(operator: Any) -> bool:
    """True if what the operator returns shares memory with an argument that it does not write to."""
    return any(
        one.alias_info is not None and not one.alias_info.is_write for one in operator_schema(operator).arguments
    )


def tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of an operator."""
    return [tensor for _, tensor in tensors((args, dict(kwargs)), "")]


class Conversion:
    """Converts tensors in place, and at the end converts them back, which rounds them.

    Args:
        root: The model.
        dtype: The new dtype of parameters, buffers and gradients.
        converted: Called with each converted tensor and its old dtype.
    """

    def __init__(self, root: nn.Module, dtype: torch.dtype, converted: Callable[[Tensor, torch.dtype], None]) -> None:
        self._root = root
        self._dtype = dtype
        self._converted = converted
        self._parameters: dict[nn.Parameter, torch.dtype] = {}
        self._buffers: list[tuple[nn.Module, str, torch.dtype]] = []
        self._optimizers: dict[Optimizer, dict[tuple[int, str], torch.dtype]] = {}

    def convert_model(self) -> None:
        """Convert parameters, their gradients, and buffers."""
        for parameter in parameters_in(self._root):
            if is_shorter(parameter.dtype, self._dtype):
                self._parameters[parameter] = parameter.dtype
                _set(parameter, self._dtype)
                self._converted(parameter, self._parameters[parameter])
        for module in modules_in(self._root):
            for name, buffer in own_buffers(module).items():
                if is_shorter(buffer.dtype, self._dtype):
                    self._buffers.append((module, name, buffer.dtype))
                    before, buffer.data = buffer.dtype, buffer.data.to(self._dtype)
                    self._converted(buffer, before)

        self._flatten()

    def convert_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Convert the state of converted parameters in an optimizer, once. Can be a hook before its step."""
        if optimizer in self._optimizers:
            return
        kept = self._optimizers[optimizer] = {}
        for parameter, key, value in self._state(optimizer):
            kept[id(parameter), key] = value.dtype
            if is_shorter(value.dtype, self._dtype) and value.dim():
                before, value.data = value.dtype, value.data.to(self._dtype)
                self._converted(value, before)

    def restore(self) -> None:
        """Convert everything back; state that is new gets the dtype of its parameter."""
        for optimizer, kept in self._optimizers.items():
            for parameter, key, value in self._state(optimizer):
                before = kept.get((id(parameter), key), self._parameters[parameter] if value.dim() else torch.float32)
                if value.dtype == self._dtype != before:
                    value.data = value.data.to(before)
        for module, name, dtype in self._buffers:
            buffer = buffers_of(module).get(name)
            if buffer is not None and buffer.dtype == self._dtype:
                buffer.data = buffer.data.to(dtype)
        for parameter, dtype in self._parameters.items():
            if parameter.dtype == self._dtype:
                _set(parameter, dtype)
        self._flatten()
        self._optimizers.clear()
        self._buffers.clear()
        self._parameters.clear()

    def _flatten(self) -> None:
        """Put the weights of recurrent layers back into one piece of memory, as cuDNN needs them."""
        for module in modules_in(self._root):
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()

    def _state(self, optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        """The tensors in the optimizer's state of converted parameters."""
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if parameter in self._parameters:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        yield parameter, key, value


def _set(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Give the parameter and its gradient another dtype, and keep both objects."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype)
    if gradient is not None:
        gradient.data = gradient.data.to(dtype)
        parameter.grad = gradient
