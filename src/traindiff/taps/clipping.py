"""Follow calls that clip gradients: `torch.nn.utils.clip_grad_*`, the method of FSDP1 and what DeepSpeed calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from traindiff.taps._torch_compat import run_as_it_is
from traindiff.taps.listeners import Listeners


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    """One call that clips gradients.

    Attributes:
        parameters: Whose gradients.
        limit: The largest norm of all of them together, or the largest magnitude of an element.
    """

    parameters: Sequence[Tensor]
    limit: float | Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippingListener:
    """What is called when gradients are clipped.

    Attributes:
        before: Before the gradients change.
        after: After it, with the norm that they had; None where elements are clipped.
    """

    before: Callable[[Clipping], None]
    after: Callable[[Clipping, Tensor | None], None]


_depth = [0]


def tap_clipping(listener: ClippingListener) -> ExitStack:
    """Have a listener called when gradients are clipped.

    There are no hooks for it, so the functions are replaced while at least one tap is attached, and put back when the
    last one is removed. `clip_grad_norm_` is followed where it multiplies the gradients, so that it makes no difference
    from where a training has imported it (since torch 2.6); `clip_grad_value_` only if it is called as an attribute of
    `torch.nn.utils`.

    Returns:
        Close it to remove the tap.
    """
    return _listeners.attach(listener)


def _install() -> None:
    utils: Any = torch.nn.utils
    if hasattr(utils.clip_grad, "_clip_grads_with_norm_"):
        # What `clip_grad_norm_` calls by its module's name for it, and the public name of the same function.
        _replace(utils.clip_grad, "_clip_grads_with_norm_", _with_norm)
        _replace(utils, "clip_grads_with_norm_", _with_norm)
    else:
        _replace(utils.clip_grad, "clip_grad_norm_", _norm)
        _replace(utils, "clip_grad_norm_", _norm)
    _replace(utils.clip_grad, "clip_grad_value_", _value)
    _replace(utils, "clip_grad_value_", _value)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        _replace(fsdp.FullyShardedDataParallel, "clip_grad_norm_", _of_fsdp)
    deepspeed = sys.modules.get("deepspeed.runtime.engine")
    if deepspeed is not None:
        _replace(deepspeed, "clip_grad_norm_", _norm)  # its own, without ZeRO in float32


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = vars(owner)[name]

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if _depth[0]:  # a part of the call that is running
            return original(*args, **kwargs)
        _depth[0] += 1
        try:
            return replacement(original, *args, **kwargs)
        finally:
            _depth[0] -= 1

    run_as_it_is(function, callees=False)
    run_as_it_is(replacement, callees=False)
    _listeners.replace(owner, name, function)


_listeners: Listeners[ClippingListener] = Listeners(_install)


def _with_norm(
    original: Callable[..., Any], parameters: Any, max_norm: Any, total_norm: Tensor, *rest: Any, **named: Any
) -> Any:
    clipping = Clipping(parameters=_listed(parameters), limit=max_norm)
    call = partial(original, clipping.parameters, max_norm, total_norm, *rest, **named)
    return _followed(clipping, call, norm_of=lambda _: total_norm)


def _norm(original: Callable[..., Any], parameters: Any, max_norm: Any, *rest: Any, **named: Any) -> Any:
    clipping = Clipping(parameters=_listed(parameters), limit=max_norm)
    return _followed(clipping, partial(original, clipping.parameters, max_norm, *rest, **named))


def _of_fsdp(original: Callable[..., Any], module: Any, max_norm: Any, *rest: Any, **named: Any) -> Any:
    clipping = Clipping(parameters=list(module.parameters()), limit=max_norm)
    return _followed(clipping, partial(original, module, max_norm, *rest, **named))


def _value(original: Callable[..., Any], parameters: Any, clip_value: float, *rest: Any, **named: Any) -> Any:
    clipping = Clipping(parameters=_listed(parameters), limit=clip_value)
    call = partial(original, clipping.parameters, clip_value, *rest, **named)
    return _followed(clipping, call, norm_of=lambda _: None)


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)  # it may be a generator


def _followed(
    clipping: Clipping, call: Callable[[], Any], *, norm_of: Callable[[Any], Tensor | None] = lambda result: result
) -> Any:
    """What a call that clips returns; `norm_of` gives the norm that it found, of its result."""
    for listener in _listeners:
        listener.before(clipping)
    result = call()
    for listener in _listeners:
        listener.after(clipping, norm_of(result))
    return result
