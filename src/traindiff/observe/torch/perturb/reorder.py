"""A replica in which sums are added up in another order.

Each function takes the permutations, the operator and its arguments, and returns the result of the operator but for
rounding. `_BY_NAME` has the function of each operator. The operators are those below autograd, of which forward and
backward passes consist.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
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

    def shuffled(self, tensor: Tensor, *axes: int) -> Tensor:
        """A copy of `tensor`, reordered along these axes; a dense tensor keeps its strides."""
        return self._selected(tensor, axes, inverse=False)

    def restored(self, tensor: Tensor, *axes: int) -> Tensor:
        """A copy of `tensor` in which `shuffled` is undone."""
        return self._selected(tensor, axes, inverse=True)

    def _selected(self, tensor: Tensor, axes: tuple[int, ...], *, inverse: bool) -> Tensor:
        for axis in axes:
            if tensor.shape[axis] > 1:
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


Arguments = list[Any]
Keywords = Mapping[str, Any]
Reordered = Callable[[Permutations, Callable[..., Any], Arguments, Keywords], Any]


def _product(position: int) -> Reordered:
    """`A @ B` over the last axis of A, which is the argument at `position`, and the last but one of B."""

    def product(order: Permutations, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
        left, right = args[position : position + 2]
        args[position] = order.shuffled(left, left.dim() - 1)
        args[position + 1] = order.shuffled(right, max(0, right.dim() - 2))
        return operator(*args, **kwargs)

    return product


def _total(order: Permutations, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """A sum or mean over some axes, or all."""
    axes = args[1] if len(args) > 1 else kwargs.get("dim")
    args[0] = order.shuffled(args[0], *(axes or range(args[0].dim())))
    return operator(*args, **kwargs)


def _softmax(order: Permutations, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """(Log-)softmax along an axis."""
    args[0] = order.shuffled(args[0], args[1])
    return order.restored(operator(*args, **kwargs), args[1])


def _softmax_backward(order: Permutations, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    axis = args[2]
    args[:2] = order.shuffled(args[0], axis), order.shuffled(args[1], axis)
    return order.restored(operator(*args, **kwargs), axis)


def _layer_norm(order: Permutations, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Over the last axes, those that weight and bias have."""
    normalized = _last(len(args[1]))
    args[0] = order.shuffled(args[0], *normalized)
    args[2:4] = [parameter if parameter is None else order.shuffled(parameter, *normalized) for parameter in args[2:4]]
    out, *statistics = operator(*args, **kwargs)
    return (order.restored(out, *normalized), *statistics)


def _layer_norm_backward(order: Permutations, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Over the last axes for the input's gradient, over the others for those of weight and bias."""
    normalized = _last(len(args[2]))
    others = tuple(range(args[1].dim() - len(normalized)))
    args[:2] = [order.shuffled(tensor, *others, *normalized) for tensor in args[:2]]
    args[3:5] = [order.shuffled(statistic, *others) for statistic in args[3:5]]
    args[5:7] = [parameter if parameter is None else order.shuffled(parameter, *normalized) for parameter in args[5:7]]
    gradient, *of_parameters = operator(*args, **kwargs)
    return (
        _restored(order, gradient, *others, *normalized),
        *(_restored(order, one, *normalized) for one in of_parameters),
    )


def _batch_norm(order: Permutations, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Over all axes but axis 1, the channels. Statistics, and running ones, are per channel."""
    axes = _but_channels(args[0])
    args[0] = order.shuffled(args[0], *axes)
    out, *statistics = operator(*args, **kwargs)
    return (order.restored(out, *axes), *statistics)


def _batch_norm_backward(order: Permutations, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    axes = _but_channels(args[0])
    args[:2] = [order.shuffled(tensor, *axes) for tensor in args[:2]]
    gradient, *of_parameters = operator(*args, **kwargs)
    return (_restored(order, gradient, *axes), *of_parameters)


def _convolution(order: Permutations, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Over the input channels, where they are not in groups."""
    transposed, groups = args[6], args[8]
    if groups == 1:
        args[0] = order.shuffled(args[0], 1)
        args[1] = order.shuffled(args[1], 0 if transposed else 1)
    return operator(*args, **kwargs)


def _convolution_backward(order: Permutations, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Over the output channels for the input's gradient, over the batch for those of weight and bias."""
    transposed, groups = args[7], args[9]
    args[:2] = [order.shuffled(tensor, 0) for tensor in args[:2]]
    output_axis = 1 if transposed else 0
    if groups == 1:
        args[0] = order.shuffled(args[0], 1)
        args[2] = order.shuffled(args[2], output_axis)
    of_input, of_weight, of_bias = operator(*args, **kwargs)
    of_input = _restored(order, of_input, 0)
    if groups == 1:
        of_weight, of_bias = _restored(order, of_weight, output_axis), _restored(order, of_bias, 0)
    return of_input, of_weight, of_bias


def _attention(order: Permutations, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Scores, over the width of a head: the last axis of query and key."""
    args[:2] = [order.shuffled(tensor, tensor.dim() - 1) for tensor in args[:2]]
    return operator(*args, **kwargs)


def _attention_backward(order: Permutations, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    args[1:3] = [order.shuffled(tensor, tensor.dim() - 1) for tensor in args[1:3]]
    of_query, of_key, *others = operator(*args, **kwargs)
    return (*(_restored(order, one, -1) for one in (of_query, of_key)), *others)


def _embedding_backward(order: Permutations, operator: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Over the places where a row of the table was used."""
    gradient, indices = args[:2]
    args[0] = order.shuffled(gradient.reshape(-1, gradient.shape[-1]), 0)
    args[1] = order.shuffled(indices.reshape(-1), 0)
    return operator(*args, **kwargs)


def _restored(order: Permutations, tensor: Tensor | None, *axes: int) -> Tensor | None:
    """`restored` for a gradient, which is None where it is not needed."""
    return None if tensor is None else order.restored(tensor, *axes)


def _last(count: int) -> tuple[int, ...]:
    return tuple(range(-count, 0))


def _but_channels(tensor: Tensor) -> tuple[int, ...]:
    return (0, *range(2, tensor.dim()))


_BY_NAME: dict[str, Reordered] = {
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
def reordered_operators() -> Mapping[Any, Reordered]:
    """The functions above by operator, for the operators that this torch has."""
    found: dict[Any, Reordered] = {}
    for name, function in _BY_NAME.items():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if operator is not None:
            found[operator] = function
    return found


class ReorderReplica:
    """Permutes the terms of matrix products, convolutions, normalizations, softmax, sums and means.

    This holds forward and backward, on the thread that trains. Other operators, integers and tensors of subclasses
    (DTensor) are computed as usual.

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
        reordered = self._operators.get(operator)
        if reordered is None or not _can_be_rounded(args):
            return operator(*args, **kwargs)
        return reordered(self._order, operator, list(args), kwargs)


def _can_be_rounded(args: tuple[Any, ...]) -> bool:
    first = args[0]
    plain = all(type(arg) in (Tensor, nn.Parameter) for arg in args if isinstance(arg, Tensor))
    return plain and (first.is_floating_point() or first.is_complex()) and first.dim() > 0 and not first.is_sparse
