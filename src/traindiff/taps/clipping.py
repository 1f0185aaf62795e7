"""Follow calls that clip gradients: `torch.nn.utils.clip_grad_*`, the method of FSDP1 and what DeepSpeed calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from traindiff.taps._torch_compat import run_as_it_is


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


_listeners: list[ClippingListener] = []
_patched: list[tuple[Any, str, Any]] = []
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
    _listeners.append(listener)
    if len(_listeners) == 1:
        _install()
    undo = ExitStack()
    undo.callback(_remove, listener)
    return undo


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
    _patched.append((owner, name, original))
    setattr(owner, name, function)


def _remove(listener: ClippingListener) -> None:
    if listener not in _listeners:
        return
    _listeners.remove(listener)
    if not _listeners:
        while _patched:
            owner, name, original = _patched.pop()
            setattr(owner, name, original)


def _with_norm(
    original: Callable[..., Any], parameters: Any, max_norm: Any, total_norm: Tensor, *rest: Any, **named: Any
) -> Any:
    clipping = Clipping(parameters=_listed(parameters), limit=max_norm)
    _before(clipping)
    result = original(clipping.parameters, max_norm, total_norm, *rest, **named)
    _after(clipping, total_norm)
    return result


def _norm(original: Callable[..., Any], parameters: Any, max_norm: Any, *rest: Any, **named: Any) -> Any:
    clipping = Clipping(parameters=_listed(parameters), limit=max_norm)
    _before(clipping)
    result = original(clipping.parameters, max_norm, *rest, **named)
    _after(clipping, result)
    return result


def _of_fsdp(original: Callable[..., Any], module: Any, max_norm: Any, *rest: Any, **named: Any) -> Any:
    clipping = Clipping(parameters=list(module.parameters()), limit=max_norm)
    _before(clipping)
    result = original(module, max_norm, *rest, **named)
    _after(clipping, result)
    return result


def _value(original: Callable[..., Any], parameters: Any, clip_value: float, *rest: Any, **named: Any) -> Any:
    clipping = Clipping(parameters=_listed(parameters), limit=clip_value)
    _before(clipping)
    result = original(clipping.parameters, clip_value, *rest, **named)
    _after(clipping, None)
    return result


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)  # it may be a generator


def _before(clipping: Clipping) -> None:
    for listener in _listeners.copy():
        listener.before(clipping)


def _after(clipping: Clipping, norm: Tensor | None) -> None:
    for listener in _listeners.copy():
        listener.after(clipping, norm)
