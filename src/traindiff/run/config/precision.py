"""Computing in a short dtype: autocast, rounded parameters, loss scaling."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from traindiff.core.torch_compat.training import modules_in, parameters_of
from traindiff.run.config.setup import Setup

_INITIAL_SCALE = 2.0**16
"""torch's own default."""


def loss_scaler(setup: Setup, *, device: torch.device, made: type[GradScaler] = GradScaler) -> GradScaler:
    """The loss scaler that `setup.loss_scale` asks for; `made` is its class, of which FSDP1 has its own.

    None means dynamic in float16 and no scale otherwise, with a scaler that is disabled; 0 means dynamic; any other
    number is a constant scale, with which a step whose gradients are not finite is skipped too.
    """
    enabled = setup.loss_scale is not None or setup.dtype == "float16"
    return made(device.type, init_scale=setup.loss_scale or _INITIAL_SCALE, enabled=enabled)


def dtype_of(setup: Setup) -> torch.dtype:
    """The dtype in which the model computes."""
    dtype: torch.dtype = getattr(torch, setup.dtype)
    return dtype


def autocast(setup: Setup, device: torch.device) -> AbstractContextManager[Any]:
    """`torch.autocast` in a short dtype, an empty context in float32."""
    if setup.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype_of(setup))


def computing_in(model: nn.Module, setup: Setup) -> None:
    """Make every call of the model compute in the setup's dtype, while the parameters stay in float32.

    During a call each module holds rounded parameters in place of its own, and floating-point inputs are rounded.
    Gradients flow through the rounding, so the parameters' gradients are the short ones, stored in float32. FSDP does
    the same in mixed precision, and DeepSpeed with its master weights.

    Args:
        model: Gets hooks, which stay. Its outputs are in the short dtype.
        setup: Nothing is done if its dtype is float32.
    """
    dtype = dtype_of(setup)
    if dtype == torch.float32:
        return
    own: list[tuple[dict[str, Any], str, nn.Parameter]] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        rounded: dict[int, Tensor] = {}
        for module in modules_in(model):
            for name, parameter in parameters_of(module).items():
                if parameter is not None and parameter.is_floating_point():
                    own.append((parameters_of(module), name, parameter))
                    rounded.setdefault(id(parameter), parameter.to(dtype))
        for holder, name, parameter in own:
            holder[name] = rounded[id(parameter)]
        return _in_dtype(args, dtype), _in_dtype(kwargs, dtype)

    def after(*_: Any) -> None:
        for holder, name, parameter in own:
            holder[name] = parameter
        own.clear()

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, always_call=True)


def round_inputs(model: nn.Module, setup: Setup) -> None:
    """Round the model's floating-point inputs to the setup's dtype; do nothing if that is float32."""
    dtype = dtype_of(setup)
    if dtype == torch.float32:
        return

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _in_dtype(args, dtype), _in_dtype(kwargs, dtype)

    model.register_forward_pre_hook(before, with_kwargs=True)


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _in_dtype(one, dtype) for name, one in value.items()}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_in_dtype(one, dtype) for one in value)
    return value
