"""Observe, in every step, whether linear layers return what their inputs and weights give, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from traindiff.core.kernels.torch_arrays import is_abstract, is_freed
from traindiff.core.observation import WITNESSED_PRODUCT
from traindiff.core.shards import Shard
from traindiff.core.site import path_in_whole
from traindiff.core.torch_compat.execution import inside_backward
from traindiff.core.witness import OF_INPUT, OF_OUTPUT, SIZE
from traindiff.errors import UnsupportedTensorError
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.followed_modules import Following, HeldHooks, takes_hooks
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
        factor: The weight as the call used it.
        place: Which gradient of the node is that of the layer's input.
        rows: Shape of the rows.
    """

    path: str
    call: int
    weight: Tensor
    factor: Factor
    place: int
    rows: Sequence[int]


class _LayerProducts:
    """Checks products, and writes a vector for each."""

    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._sink = context.sink
        self._guarded = partial(context.sink.guarded, "layer_products")
        self._attention = AttentionCalls(self._guarded(self._called_in_attention))

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
            hooks.after_forward(
                module, self._guarded(partial(self._called, path_in_whole(path))), with_kwargs=True, prepend=True
            )

    def _called(self, path: str, module: Any, args: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        given = next(iter((*args, *named.values())), None)
        weight = plain_weight(module) if isinstance(given, Tensor) else None
        if weight is not None:
            self._check(path, given, weight, module.bias, output)

    def _called_in_attention(
        self, path: str, _: nn.Module, given: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor
    ) -> None:
        self._check(path, given, weight, bias, output)

    def _check(self, path: str, given: Any, weight: Tensor, bias: Any, output: Any) -> None:
        progress = self._sink.progress
        tensors = [given, weight, output, *([] if bias is None else [bias])]
        if (
            not progress.observing or progress.evaluating or progress.hidden or inside_backward()
            or not all(map(is_plain, tensors)) or is_abstract(output) or output.numel() == 0
            or given.shape[-1:] != weight.shape[1:] or output.shape != (*given.shape[:-1], weight.shape[0])
        ):  # fmt: skip
            return
        try:
            factor = factor_of(weight, output.dtype)  # now: no counter sees writes through `.data`
            call = progress.next_call(path, WITNESSED_PRODUCT)
            self._emit(check_output(factor, given, bias, output), "forward", path, OF_OUTPUT, call)
        except UnsupportedTensorError:
            return
        if (found := product_node(output)) is not None:
            node, place = found
            node.register_hook(
                self._guarded(
                    partial(self._returned, _Call(path, call, weight.detach(), factor, place, output.shape[:-1]))
                )
            )

    def _returned(self, call: _Call, of_inputs: tuple[Any, ...], gradients: tuple[Any, ...]) -> None:
        """The node of a product has computed the gradients of its inputs."""
        found, gradient, (outputs, inputs) = of_inputs[call.place], gradients[0], call.factor.shape
        if (
            not self._sink.progress.observing or not is_plain(found) or not is_plain(gradient) or is_abstract(found)
            or found.numel() == 0 or gradient.shape[-1] != outputs or found.shape[-1] != inputs
        ):  # fmt: skip
            return
        vector = check_gradient(call.factor, gradient, found, call.rows)
        if (found.device.type != "cpu" or vector[0] > _SUSPECT) and not is_freed(call.weight):
            now = check_gradient(factor_of(call.weight, call.factor.dtype), gradient, found, call.rows)
            vector = torch.where(now[0] < vector[0], now, vector)
        self._emit(vector, "backward", call.path, OF_INPUT, call.call)

    def _emit(self, vector: Tensor, phase: str, path: str, slot: str, call: int) -> None:
        self._sink.emit(
            vector, phase=phase, path=path, slot=slot, stage=WITNESSED_PRODUCT, call=call, shard=_WHOLE, scaled=False
        )
