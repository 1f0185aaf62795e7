"""Follow the products inside calls of `nn.MultiheadAttention`, which uses its weights without calling modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from traindiff.core.torch_compat.autograd import storage_key
from traindiff.core.torch_compat.compiling import exclude_from_compilation
from traindiff.observe.common.listeners import Listeners
from traindiff.observe.torch.hooks.followed_modules import HeldHooks
from traindiff.observe.torch.witness.errors import NotWitnessedError
from traindiff.observe.torch.witness.layers import Layers
from traindiff.observe.torch.witness.probes import Extent
from traindiff.observe.torch.witness.use import Held, Use

_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")

Called = Callable[[str, nn.Module, Tensor, Tensor, "Tensor | None", Tensor], None]
"""Is given the path and the module; input, weight, bias and output of a product in it."""


class AttentionCalls:
    """Tells of each product in calls of `nn.MultiheadAttention`.

    There are no hooks for them, so `torch.nn.functional.linear` is replaced during such calls, and only then: tables of
    functions that a training or a compiler keeps know the original.

    Args:
        called: Called after each product.
    """

    def __init__(self, called: Called) -> None:
        self._called = called
        self._inside: list[tuple[str, nn.Module]] = []
        self._listening = ExitStack()

    def attach(self) -> ExitStack:
        """Follow products from now on. Close the result to end it."""
        undo = ExitStack()
        undo.callback(self._leave)
        return undo

    def hook(self, path: str, module: nn.Module, hooks: HeldHooks, guarded: Callable[..., Any]) -> None:
        """Follow the calls of one module."""
        hooks.before_forward(module, guarded(partial(self._begin, path)))
        hooks.after_forward(module, guarded(self._end), always_call=True)

    def product(self, given: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> None:
        """Called after a product, anywhere."""
        if self._inside:
            self._called(*self._inside[-1], given, weight, bias, output)

    def uses(
        self, layers: Layers, path: str, module: Any, given: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor
    ) -> Iterator[Use]:
        """The uses of parameters in a product.

        Raises:
            NotWitnessedError: The product cannot be witnessed.
        """
        owner, name = (module, _WEIGHTS) if not _is_part(weight, module.out_proj.weight) else (
            module.out_proj, ("weight",)
        )  # fmt: skip
        at = path if owner is module else f"{path}.out_proj".strip(".")
        names = [one for one in name if _is_part(weight, getattr(owner, one, None))]
        if not names:
            raise NotWitnessedError("attention computes with other weights than its own")
        held_weight = _cut(layers.held(at, owner, names[0], given, output), getattr(owner, names[0]), weight)
        held_bias = None
        bias_name = "in_proj_bias" if owner is module else "bias"
        if bias is not None:
            held_bias = _cut(layers.held(at, owner, bias_name, output), getattr(owner, bias_name), bias)
        yield from layers.product(given, held_weight, held_bias, output)

    def _begin(self, path: str, module: nn.Module, *_: Any) -> None:
        if not self._inside:
            self._listening = _listeners.attach(self)
        self._inside.append((path, module))

    def _end(self, module: nn.Module, *_: Any) -> None:
        while self._inside and self._inside.pop()[1] is not module:
            pass
        if not self._inside:
            self._listening.close()

    def _leave(self) -> None:
        self._inside.clear()
        self._listening.close()


def _is_part(part: Tensor, whole: Any) -> bool:
    """True if a tensor is a parameter, or consecutive rows of it."""
    return (
        isinstance(whole, Tensor) and part.shape[1:] == whole.shape[1:] and storage_key(part) == storage_key(whole)
        and 0 <= part.storage_offset() - whole.storage_offset() < whole.numel()
    )  # fmt: skip


def _cut(held: Held | None, whole: Tensor, part: Tensor) -> Held | None:
    """The part of a parameter that a product uses."""
    if held is None or part.shape == whole.shape:
        return held
    if held.divided or not _is_part(part, whole):
        raise NotWitnessedError("attention computes with other weights than its own")
    inner = whole.stride(0)
    first = (part.storage_offset() - whole.storage_offset()) // inner
    return Held(
        path=held.path, leaf=held.leaf, local=part.detach(), divided=False,
        extent=Extent(((first, part.shape[0]),), held.extent.columns),
    )  # fmt: skip


def _install() -> None:
    original = functional.linear

    @wraps(original)
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002  as torch names it
        output = original(input, weight, bias)
        if not is_compiling():
            for listener in _listeners:
                listener.product(input, weight, bias, output)
        return output

    exclude_from_compilation(linear, callees=False)
    _listeners.replace(functional, "linear", linear)


_listeners: Listeners[AttentionCalls] = Listeners(_install)
