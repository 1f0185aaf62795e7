"""A replica in which the statistics of batches have the error of a kernel that adds one row after the other.

Such an error is one number per channel, and the same in every row of the channel. It does not average out in sums over
rows, as independent errors do. `ulp` and `reorder` show none of this size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor

from traindiff.core.torch_compat.operators import operator_schema
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.perturb.replica import Dispatching
from traindiff.observe.torch.perturb.ulp import random_signs, rounding_key

_FORWARD = ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm")
_BACKWARD = ("native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm_backward")

_WANDERS = 0.25
"""Error of a sum of n random terms of size 1 that are added one after the other, in units of n u: each of n additions
rounds a partial sum of about sqrt(n), and sqrt(sum of i) is 0.7 n, of which rounding to nearest makes a third."""


@cache
def _operators(names: tuple[str, ...]) -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return frozenset(packet.default for packet in packets if packet is not None)


class ChannelReplica:
    """Moves means and variances of batches, and what follows from them, by errors that each channel's rows share.

    A sum of n terms in unit roundoff u moves by -1, 0 or 1 times `u (sqrt(n) |sum| + n r / 4)`, r the root mean square
    of the terms. Forward, these are the sums of the values and of their squares; backward, those of the gradient, and
    of the gradient times the normalized value. u is that of float32, in which kernels add up shorter dtypes too.

    Args:
        seed: Another seed moves other channels. The generators of the training are not used.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def attach(self, sink: Sink) -> ExitStack:
        """Enter the dispatch mode; see `Replica.attach`."""
        return Dispatching(self._compute, sink).enter()

    def _compute(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = operator(*args, **kwargs)
        if operator in _operators(_FORWARD):
            self._forward(_by_name(operator, args, kwargs), result)
        elif operator in _operators(_BACKWARD):
            self._backward(_by_name(operator, args, kwargs), result)
        return result

    def _forward(self, given: Mapping[str, Any], result: tuple[Tensor, ...]) -> None:
        output, mean, inverse = result[:3]
        if not given.get("training", True) or not output.numel():
            return
        shape = (1, -1, *(1 for _ in output.shape[2:]))
        rows, u, wide = output.numel() / output.shape[1], *_precision(output)
        weight, bias = (given.get(name) for name in ("weight", "bias"))
        scale = u * math.sqrt(rows) * self._signs(inverse, "variance")
        deviation = inverse.to(wide).reciprocal()
        shift = self._signs(mean, "mean") * _error(mean.to(wide) * rows, deviation, rows, u) / rows
        moved = output.to(wide)
        centered = moved if bias is None else moved - bias.to(wide).view(shape)
        slope = inverse.to(wide) if weight is None else inverse.to(wide) * weight.to(wide)
        output.copy_(moved + centered * scale.view(shape) - (slope * shift).view(shape))
        momentum = given.get("momentum", given.get("exponential_average_factor"))
        if given.get("running_mean") is not None and momentum is not None:
            given["running_mean"].add_(momentum * shift)
            given["running_var"].add_(-2.0 * momentum * scale * deviation.square())
        mean.add_(shift)
        inverse.mul_(1.0 + scale)

    def _backward(self, given: Mapping[str, Any], result: tuple[Tensor | None, ...]) -> None:
        gradient = given["grad_out"] if "grad_out" in given else given["grad_output"]
        mean, inverse = given["save_mean"], given["save_invstd" if "save_invstd" in given else "save_var"]
        if not given.get("train", given.get("update", True)) or not gradient.numel() or mean is None:
            return
        shape = (1, -1, *(1 for _ in gradient.shape[2:]))
        axes = (0, *range(2, gradient.dim()))
        rows, u, wide = gradient.numel() / gradient.shape[1], *_precision(gradient)
        came, inverse = gradient.to(wide), inverse.to(wide)
        normalized = (given["input"].to(wide) - mean.to(wide).view(shape)) * inverse.view(shape)
        size = came.square().mean(axes).sqrt()
        totals = came.sum(axes), (came * normalized).sum(axes)
        plain, scaled = (
            self._signs(total, name) * _error(total, size, rows, u)
            for total, name in zip(totals, ("gradient", "product"), strict=True)
        )
        of_input, of_weight, of_bias = result[:3]
        if of_input is not None:
            slope = inverse if given.get("weight") is None else inverse * given["weight"].to(wide)
            error = (slope / rows).view(shape) * (plain.view(shape) + normalized * scaled.view(shape))
            of_input.copy_(of_input.to(wide) - error)
        for found, error in ((of_weight, scaled), (of_bias, plain)):
            if found is not None and found.numel():
                found.copy_(found.to(wide) + error)

    def _signs(self, values: Tensor, name: str) -> Tensor:
        """-1, 0 or 1 for each channel, from the bits of a statistic: a repeated forward pass is repeated exactly."""
        return random_signs(values, rounding_key(self._seed, name))


def _error(total: Tensor, size: Tensor, rows: float, u: float) -> Tensor:
    """How far a sum may be off, by channel, from the sum and the size of its terms."""
    return u * (math.sqrt(rows) * total.abs() + _WANDERS * rows * size)


def _precision(tensor: Tensor) -> tuple[float, torch.dtype]:
    """Unit roundoff and dtype in which a kernel adds up a tensor."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return torch.finfo(wide).eps / 2, wide


def _by_name(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of an operator by their names in its schema."""
    names = [one.name for one in operator_schema(operator).arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
