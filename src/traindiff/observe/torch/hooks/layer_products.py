"""Observe, in every step, whether linear layers return what their inputs and weights give, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from traindiff.core.kernels.torch_arrays import is_abstract, is_freed
from traindiff.core.observation import WITNESSED_PRODUCT
from traindiff.core.shards import Shard
from traindiff.core.site import path_in_whole
from traindiff.core.torch_compat.autograd import inside_backward
from traindiff.core.torch_compat.training import parameters_of
from traindiff.core.witness import OF_INPUT, OF_OUTPUT, SIZE
from traindiff.errors import UnsupportedTensorError
from traindiff.observe.torch.hooks.compiled import LayerObserver, tap_compiled_layer
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.followed_modules import Following, HeldHooks, takes_hooks
from traindiff.observe.torch.hooks.inert_on_copy import is_first_hook
from traindiff.observe.torch.products.rounding import precision_of_products
from traindiff.observe.torch.witness.attention import AttentionCalls
from traindiff.observe.torch.witness.layer_products import (
    Factor,
    check_gradient,
    check_output,
    factor_of,
    is_plain,
    plain_weight,
    product_node,
)
from traindiff.observe.torch.witness.prepared_products import Prepared, prepared

_WHOLE = Shard.whole((SIZE,))

_SUSPECT = 2.5
"""Error of a row, in units of what rounding explains, that right products do not reach: they are checked once more."""


def attach(context: TapContext) -> None:
    """Check each product of a linear layer (phases `forward` and `backward`, stage `witness product`).

    What a call returned is checked when it returns, and the gradient of its input at the node of the graph that
    computed it. The products of calls that activation checkpointing repeats are checked the first time.
    """
    _LayerProducts(context).attach()


class _Call(NamedTuple):
    """A call of a layer, whose backward pass is to come.

    Attributes:
        path: The layer's path.
        call: Number of the call.
        weight: Its weight. Trainings that write to it through `.data` before the backward pass are not found out by
            torch, which then computes with the new one.
        factor: Makes the weight as the call used it.
        output: Shape of its output.
        of_input: Checks a gradient of the input quickly, given that of the output, if it looks as expected.
    """

    path: str
    call: int
    weight: Tensor
    factor: Callable[[], Factor]
    output: Sequence[int]
    of_input: Callable[[Any, Any], Tensor | None]


class _LayerProducts:
    """Checks products, and writes a vector for each."""

    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._sink = context.sink
        self._guarded = partial(context.sink.guarded, "layer_products")
        self._attention = AttentionCalls(self._guarded(self._called_in_attention))
        self._prepared: dict[str, Prepared | None] = {}  # by path
        self._latest: dict[str, Sequence[int]] = {}  # shape of the input of a call that was not prepared, by path
        self._settings: tuple[Any, ...] = ()  # what users set for all products
        self._read_in = -1  # the step in which that was read

    def attach(self) -> None:
        context = self._context
        taking = [(path, module) for path, module in context.targets.modules.items() if takes_hooks(module)]
        context.undo.enter_context(
            context.followed.follow(taking, Following(hook=self._hook, lost=lambda *_: None, grows=True))
        )
        context.undo.enter_context(self._attention.attach())

    def _hook(self, path: str, module: nn.Module, hooks: HeldHooks) -> None:
        if isinstance(module, nn.MultiheadAttention):
            self._attention.hook(path_in_whole(path), module, hooks, self._guarded)
        elif type(module).forward is nn.Linear.forward and "forward" not in vars(module):
            called = self._guarded(partial(self._called, path_in_whole(path)))
            hooks.after_forward(module, called, with_kwargs=True, prepend=True)
            in_compiled = self._guarded(partial(self._called_in_compiled, path_in_whole(path)))
            observer = LayerObserver(called=in_compiled)
            hooks.undo.enter_context(tap_compiled_layer(module, observer))

    def _called(self, path: str, module: Any, args: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        if self._is_hidden() or not is_first_hook(module):
            return
        given, own = args[0] if args else next(iter(named.values()), None), parameters_of(module)
        quick = own.get("weight")  # which code does not compute
        if quick is None or not self._check_quickly(path, given, quick, own.get("bias"), output):
            if not isinstance(given, Tensor) or (weight := plain_weight(module)) is None:
                return
            self._check_fully(path, given, weight, module.bias, output)

    def _called_in_compiled(
        self, path: str, given: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor
    ) -> None:
        if not self._is_hidden() and not self._check_quickly(path, given, weight, bias, output):
            self._check_fully(path, given, weight, bias, output)

    def _check_fully(self, path: str, given: Tensor, weight: Tensor, bias: Any, output: Any) -> None:
        if self._check(path, given, weight, bias, output):
            if self._latest.get(path) == given.shape:  # it may come again
                self._prepared[path] = prepared(given, weight, bias, output)
            self._latest[path] = given.shape

    def _called_in_attention(
        self, path: str, _: nn.Module, given: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor
    ) -> None:
        if not self._is_hidden():
            self._check(path, given, weight, bias, output)

    def _is_hidden(self) -> bool:
        """True if calls are not to be checked now."""
        progress = self._sink.progress
        hidden = not progress.observing or progress.evaluating or progress.hidden or inside_backward()
        return hidden or self._context.other_threads.is_this()

    def _check_quickly(self, path: str, given: Any, weight: Tensor, bias: Any, output: Any) -> bool:
        """Check a call that looks like those before; False if it does not, or if its product may be wrong."""
        step = self._sink.progress.number_of(self._sink.progress.optimizer)
        if step != self._read_in:
            self._read_in, before, self._settings = step, self._settings, precision_of_products()
            if before != self._settings:
                self._prepared.clear()
        known = self._prepared.get(path)
        if known is None:
            return False
        found = known.output(given, weight, bias, output)
        if found is None or float(found[0][0]) > _SUSPECT:
            return False
        vector, by_output = found
        call = self._sink.progress.next_call(path, WITNESSED_PRODUCT)
        self._emit(vector, "forward", path, OF_OUTPUT, call)
        of_input, factor = partial(known.of_input, by_output), partial(known.factor, by_output)
        self._wait(_Call(path, call, weight.detach(), factor, output.shape, of_input), output)
        return True

    def _check(self, path: str, given: Any, weight: Tensor, bias: Any, output: Any) -> bool:
        """Check any call; False if it cannot be checked."""
        tensors = [given, weight, output, *([] if bias is None else [bias])]
        if (
            not all(map(is_plain, tensors)) or is_abstract(output) or output.numel() == 0
            or given.shape[-1:] != weight.shape[1:] or output.shape != (*given.shape[:-1], weight.shape[0])
        ):  # fmt: skip
            return False
        try:
            factor = factor_of(weight, output.dtype)  # now: no counter sees writes through `.data`
            call = self._sink.progress.next_call(path, WITNESSED_PRODUCT)
            self._emit(check_output(factor, given, bias, output), "forward", path, OF_OUTPUT, call)
        except UnsupportedTensorError:
            return False
        self._wait(_Call(path, call, weight.detach(), lambda: factor, output.shape, lambda *_: None), output)
        return True

    def _wait(self, call: _Call, output: Tensor) -> None:
        """Have the gradient of the input checked when it is computed."""
        if (found := product_node(output)) is not None:
            node, place = found
            node.register_hook(self._guarded(partial(self._returned, call, place)))

    def _returned(self, call: _Call, place: int, of_inputs: tuple[Any, ...], gradients: tuple[Any, ...]) -> None:
        """The node of a product has computed the gradients of its inputs, the layer's in the given place."""
        if not self._sink.progress.observing:
            return
        found, gradient = of_inputs[place], gradients[0]
        vector = call.of_input(gradient, found)
        if vector is None or float(vector[0]) > _SUSPECT:
            vector = self._checked(call, gradient, found)
        if vector is not None:
            self._emit(vector, "backward", call.path, OF_INPUT, call.call)

    def _checked(self, call: _Call, gradient: Any, found: Any) -> Tensor | None:
        """The check of the gradient of an input; None if it cannot be checked."""
        factor = call.factor()
        outputs, inputs = factor.shape
        if (
            not is_plain(found) or not is_plain(gradient) or is_abstract(found)
            or found.numel() == 0 or gradient.shape[-1] != outputs or found.shape[-1] != inputs
        ):  # fmt: skip
            return None
        on_cpu, is_kept = found.device.type == "cpu", not is_freed(call.weight)
        if not on_cpu and is_kept and factor.dtype == call.weight.dtype:
            factor = factor_of(call.weight, factor.dtype)  # the node has computed with what it holds now
        rows = call.output[:-1]
        vector = check_gradient(factor, gradient, found, rows)
        if on_cpu and is_kept and vector[0] > _SUSPECT:
            now = check_gradient(factor_of(call.weight, factor.dtype), gradient, found, rows)
            vector = torch.where(now[0] < vector[0], now, vector)
        return vector

    def _emit(self, vector: Tensor, phase: str, path: str, slot: str, call: int) -> None:
        self._sink.emit(
            vector, phase=phase, path=path, slot=slot, stage=WITNESSED_PRODUCT, call=call, shard=_WHOLE, scaled=False
        )
