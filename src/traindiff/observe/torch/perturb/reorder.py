"""A replica in which sums are added up in another order.

`_BY_NAME` has a function for each operator, which says what is reordered. The result of the operator stays the same but
for rounding. The operators are those below autograd, of which forward and backward passes consist.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.perturb.replica import Dispatching
from traindiff.observe.torch.perturb.ulp import rounding_key

_MOST = 256
"""Permutations that are kept."""


class Permutations:
    """One permutation per length of an axis, so a repeated operation is reordered alike.

    Args:
        seed: Another seed gives other permutations. The generators of the training are not used.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: OrderedDict[tuple[int, torch.device], tuple[Tensor, Tensor]] = OrderedDict()

    def shuffled(self, tensor: Tensor | None, *axes: int) -> Tensor | None:
        """A copy of `tensor`, reordered along these axes; a dense tensor keeps its strides. None is left."""
        return self._selected(tensor, axes, inverse=False)

    def restored(self, tensor: Tensor | None, *axes: int) -> Tensor | None:
        """A copy of `tensor` in which `shuffled` is undone."""
        return self._selected(tensor, axes, inverse=True)

    def _selected(self, tensor: Tensor | None, axes: tuple[int, ...], *, inverse: bool) -> Tensor | None:
        for axis in axes:
            if tensor is not None and tensor.shape[axis] > 1:
                order = self._of(tensor.shape[axis], tensor.device)[inverse]
                tensor = torch.index_select(tensor, axis, order, out=torch.empty_like(tensor))
        return tensor

    def _of(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The permutation of `length` elements and its inverse: int64 [length]."""
        found = self._kept.pop((length, device), None)
        if found is None:
            generator = torch.Generator().manual_seed(rounding_key(self._seed, length) & 0xFFFFFFFF)
            order = torch.randperm(length, generator=generator, device="cpu")
            found = order.to(device), order.argsort().to(device)
        self._kept[length, device] = found  # the most recent is last
        if len(self._kept) > _MOST:
            self._kept.popitem(last=False)
        return found


Axes = Mapping[int, Sequence[int]]
"""Axes along which tensors are reordered, by position of the tensor. Those that are None are left."""

Reordering = Callable[[list[Any], Mapping[str, Any]], tuple[Axes, Axes]]
"""Gives the axes along which arguments are shuffled, and those along which results are restored.

The order of whatever is summed changes, and the results are in their places. Arguments may be exchanged in the list.
"""


def _product(position: int) -> Reordering:
    """`A @ B` over the last axis of A, which is the argument at `position`, and the last but one of B."""

    def product(args: list[Any], kwargs: Mapping[str, Any]) -> tuple[Axes, Axes]:
        del kwargs
        return {position: (-1,), position + 1: (max(0, args[position + 1].dim() - 2),)}, {}

    return product


def _total(args: list[Any], kwargs: Mapping[str, Any]) -> tuple[Axes, Axes]:
    """A sum or mean over some axes, or all."""
    axes = args[1] if len(args) > 1 else kwargs.get("dim")
    return {0: axes or range(args[0].dim())}, {}


def _softmax(args: list[Any], _: Mapping[str, Any]) -> tuple[Axes, Axes]:
    """(Log-)softmax along an axis."""
    axes = (args[1],)
    return {0: axes}, {0: axes}


def _softmax_backward(args: list[Any], _: Mapping[str, Any]) -> tuple[Axes, Axes]:
    axes = (args[2],)
    return {0: axes, 1: axes}, {0: axes}


def _layer_norm(args: list[Any], _: Mapping[str, Any]) -> tuple[Axes, Axes]:
    """Over the last axes, those that weight and bias have."""
    normalized = _last(len(args[1]))
    return {0: normalized, 2: normalized, 3: normalized}, {0: normalized}


def _layer_norm_backward(args: list[Any], _: Mapping[str, Any]) -> tuple[Axes, Axes]:
    """Over the last axes for the input's gradient, over the others for those of weight and bias."""
    normalized = _last(len(args[2]))
    others = tuple(range(args[1].dim() - len(normalized)))
    every = (*others, *normalized)
    given = {0: every, 1: every, 3: others, 4: others, 5: normalized, 6: normalized}
    return given, {0: every, 1: normalized, 2: normalized}


def _batch_norm(args: list[Any], _: Mapping[str, Any]) -> tuple[Axes, Axes]:
    """Over all axes but axis 1, the channels. Statistics, and running ones, are per channel."""
    axes = _but_channels(args[0])
    return {0: axes}, {0: axes}


def _batch_norm_backward(args: list[Any], _: Mapping[str, Any]) -> tuple[Axes, Axes]:
    axes = _but_channels(args[0])
    return {0: axes, 1: axes}, {0: axes}


def _convolution(args: list[Any], _: Mapping[str, Any]) -> tuple[Axes, Axes]:
    """Over the input channels, where they are not in groups."""
    transposed, groups = args[6], args[8]
    return ({0: (1,), 1: (0 if transposed else 1,)} if groups == 1 else {}), {}


def _convolution_backward(args: list[Any], _: Mapping[str, Any]) -> tuple[Axes, Axes]:
    """Over the output channels for the input's gradient, over the batch for those of weight and bias."""
    transposed, groups = args[7], args[9]
    if groups != 1:
        return {0: (0,), 1: (0,)}, {0: (0,)}
    output = (1 if transposed else 0,)
    return {0: (0, 1), 1: (0,), 2: output}, {0: (0,), 1: output, 2: (0,)}


def _attention(_: list[Any], __: Mapping[str, Any]) -> tuple[Axes, Axes]:
    """Scores, over the width of a head: the last axis of query and key."""
    return {0: (-1,), 1: (-1,)}, {}


def _attention_backward(_: list[Any], __: Mapping[str, Any]) -> tuple[Axes, Axes]:
    return {1: (-1,), 2: (-1,)}, {0: (-1,), 1: (-1,)}


def _embedding_backward(args: list[Any], _: Mapping[str, Any]) -> tuple[Axes, Axes]:
    """Over the places where a row of the table was used."""
    gradient, indices = args[:2]
    args[:2] = gradient.reshape(-1, gradient.shape[-1]), indices.reshape(-1)
    return {0: (0,), 1: (0,)}, {}


def _last(count: int) -> tuple[int, ...]:
    return tuple(range(-count, 0))


def _but_channels(tensor: Tensor) -> tuple[int, ...]:
    return (0, *range(2, tensor.dim()))


_BY_NAME: dict[str, Reordering] = {
    "mm": _product(0), "bmm": _product(0), "mv": _product(0),
    "addmm": _product(1), "baddbmm": _product(1), "addmv": _product(1), "_addmm_activation": _product(1),
    "sum": _total, "sum.dim_IntList": _total, "mean": _total, "mean.dim": _total,
    "_softmax": _softmax, "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward, "_log_softmax_backward_data": _softmax_backward,
    "native_layer_norm": _layer_norm, "native_layer_norm_backward": _layer_norm_backward,
    "native_batch_norm": _batch_norm, "native_batch_norm_backward": _batch_norm_backward,
    "_native_batch_norm_legit": _batch_norm, "_batch_norm_with_update": _batch_norm,
    "batch_norm_backward": _batch_norm_backward,
    "cudnn_batch_norm": _batch_norm, "cudnn_batch_norm_backward": _batch_norm_backward,
    "convolution": _convolution, "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "embedding_dense_backward": _embedding_backward,
}  # fmt: skip
"""By `operator` or `operator.overload` of aten. Other operators are computed as usual."""


@cache
def reordered_operators() -> Mapping[Any, Reordering]:
    """The functions above by operator, for the operators that this torch has."""
    found: dict[Any, Reordering] = {}
    for name, function in _BY_NAME.items():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if operator is not None:
            found[operator] = function
    return found


class ReorderReplica:
    """Permutes the terms of matrix products, convolutions, normalizations, softmax, sums and means.

    This holds forward and backward, on the thread that trains. Other operators, integers, sparse tensors and those
    of subclasses (DTensor) are computed as usual.

    Args:
        seed: Another seed permutes in another way.
    """

    def __init__(self, seed: int) -> None:
        self._order = Permutations(seed)
        self._operators = reordered_operators()

    def attach(self, sink: Sink) -> ExitStack:
        """Enter the dispatch mode; see `Replica.attach`."""
        return Dispatching(self._compute, sink).enter()

    def _compute(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        reordering = self._operators.get(operator)
        if reordering is None or not _can_be_rounded(args):
            return operator(*args, **kwargs)
        arguments = list(args)
        given, made = reordering(arguments, kwargs)
        for position, axes in given.items():
            arguments[position] = self._order.shuffled(arguments[position], *axes)
        result = operator(*arguments, **kwargs)
        if isinstance(result, Tensor):
            return self._order.restored(result, *made.get(0, ()))
        return tuple(self._order.restored(one, *made.get(number, ())) for number, one in enumerate(result))


def _can_be_rounded(args: tuple[Any, ...]) -> bool:
    first, tensors = args[0], [arg for arg in args if isinstance(arg, Tensor)]
    plain = all(type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided for one in tensors)
    return plain and (first.is_floating_point() or first.is_complex()) and first.dim() > 0
