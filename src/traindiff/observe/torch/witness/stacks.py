"""What products with a stack of matrices contribute to it: the weights of experts, of heads, of groups of rows.

A stack W has three axes, e, i and o. Its signs are products of three: of the matrix, which is a row of the parameter,
and of both axes. So one product contributes `a_e (x·b) (g·c)` for each row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from traindiff.core.torch_compat.autograd import saved
from traindiff.observe.torch.witness import products as of
from traindiff.observe.torch.witness.errors import NotWitnessedError
from traindiff.observe.torch.witness.graph import Place, chain_of
from traindiff.observe.torch.witness.layers import Layers
from traindiff.observe.torch.witness.places import axes_of, selected, shape_of
from traindiff.observe.torch.witness.products import Products
from traindiff.observe.torch.witness.use import Held, Use

_OTHER_PART = "an operation uses another part of it than this rank has"


class _Stack(NamedTuple):
    """How an operation uses a stack of matrices.

    Attributes:
        axes: Which axis of the stack is the last but one of the operation's input, and which is the last: 1 and 2.
        number: Which matrix it uses; None for all.
    """

    axes: tuple[int, int]
    number: int | None


def stack_of(place: Place) -> _Stack | None:
    """How the operation at a place uses a stack of matrices; None if the parameter is none, or lies in another way."""
    if len(shape_of(chain_of(place)[-1])) != 3:
        return None
    axes, number = axes_of(place, selects=True), selected(place)
    if axes is None or (number is None) != (axes[:1] == ((0,),)):
        return None
    if number is None:
        axes = axes[1:]
    while len(axes) > 2 and axes[0] == ():
        axes = axes[1:]
    return _Stack((axes[0][0], axes[1][0]), number) if axes in (((1,), (2,)), ((2,), (1,))) else None


def is_grouped(place: Place) -> bool:
    """True for all matrices of a stack, in a product of a matrix whose rows are in groups."""
    stack, node = stack_of(place), place.node
    return stack is not None and stack.number is None and len(saved(node, "self_sym_sizes")) == 2


def of_stack(
    layers: Layers, place: Place, held: Held, gradient: Tensor, other: Tensor, *, left: Tensor, right: Tensor
) -> Use:
    """The use of matrices whose gradients are the sums over rows of `left rightᵀ`.

    Args:
        layers: The signs.
        place: The operation.
        held: The stack.
        gradient: Gradient of the operation's result.
        other: The other factor.
        left: Shape (matrices, M, I), or (M, I) of one.
        right: Shape (matrices, M, O), or (M, O).
    """
    stack = stack_of(place)
    assert stack is not None
    a = layers.probes.row_factors(held.path, held.extent, gradient)
    length = left.shape[-2]
    if stack.number is not None:
        if left.shape[:-2].numel() != 1 or stack.number >= a.shape[0]:
            raise NotWitnessedError(_OTHER_PART)
        a = a[stack.number].expand(length, -1)
    elif left.dim() == 3 and left.shape[0] == a.shape[0]:
        a = a.repeat_interleave(length, 0)
    else:
        raise NotWitnessedError(_OTHER_PART)
    return _use(
        layers, held, stack, gradient, other, left, right, a, rows=length, alpha=saved(place.node, "alpha", 1.0)
    )


def of_groups(layers: Layers, place: Place, held: Held, gradient: Tensor, *, left: Tensor, ends: Tensor) -> Use:
    """The use of matrices of which each is multiplied by a group of rows.

    Args:
        layers: The signs.
        place: The operation.
        held: The stack.
        gradient: Gradient of the operation's result.
        left: All rows; rows behind the last group belong to none.
        ends: Where each group ends.
    """
    stack = stack_of(place)
    assert stack is not None
    a = layers.probes.row_factors(held.path, held.extent, gradient)
    if ends.numel() != a.shape[0]:
        raise NotWitnessedError(_OTHER_PART)
    count = int(ends[-1]) if ends.numel() else 0
    number = torch.bucketize(torch.arange(count, device=ends.device), ends.long(), right=True)
    most = torch.bincount(number).max() if count else 0
    return _use(layers, held, stack, gradient, left, left[:count], gradient[:count], a[number], rows=most, alpha=1.0)


def _use(
    layers: Layers, held: Held, stack: _Stack, gradient: Tensor, other: Tensor, left: Tensor, right: Tensor, a: Tensor,
    *, rows: Any, alpha: Any,
) -> Use:  # fmt: skip
    """The use, given the sign of the matrix of each row."""
    signs = layers.probes.axes(held.path, held.extent, gradient)
    sides = [(part, signs[axis - 1]) for part, axis in zip((left, right), stack.axes, strict=True)]
    if any(part.shape[-1] != side.shape[1] for part, side in sides):
        raise NotWitnessedError(_OTHER_PART)
    p, q = (of.of_tensor(part, side) for part, side in sides)
    factor = a * float(alpha)

    def products(_: Tensor) -> Products:
        return of.of_rows(p * factor, q, rows=rows)

    return layers.use(held, products, other, gradient, width=left.shape[-1] + right.shape[-1])
