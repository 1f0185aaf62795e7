"""What the place of an operation tells: how the parameter lies in its input, and what it saved."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from traindiff.core.torch_compat.autograd import result_shape, saved, saved_dim, saved_dims, saved_index
from traindiff.observe.torch.witness.errors import NotWitnessedError
from traindiff.observe.torch.witness.graph import (
    CASTS,
    EXPAND,
    PERMUTES,
    RESHAPES,
    SELECT,
    TRANSPOSES,
    Place,
    chain_of,
    kind_of,
)

Axes = tuple[tuple[int, ...], ...]
"""For each axis of a view of a parameter, the axes of the parameter that lie along it; none for an axis of size 1."""


def shape_of(node: Any) -> tuple[int, ...]:
    """Shape of the result of a node with one result, or of a leaf."""
    return result_shape(node, 0)


def axes_of(place: Place, *, selects: bool = False) -> Axes | None:
    """How the axes of a parameter lie in the input of an operation; None if that is no mere exchange of axes.

    Args:
        place: Where it is.
        selects: Allow views of one of several matrices: they lack axis 0. `selected` tells which it is.
    """
    leaf, *views = reversed(chain_of(place))
    sizes = shape_of(leaf)
    axes: Axes | None = tuple((axis,) if size != 1 else () for axis, size in enumerate(sizes))
    for node in views:
        if axes is None:
            return None
        kind = kind_of(node)
        if kind in TRANSPOSES:
            axes = axes[::-1]
        elif kind in PERMUTES:
            dims = [dim % len(axes) for dim in saved_dims(node)]
            if kind.startswith("Transpose"):
                order = list(range(len(axes)))
                order[dims[0]], order[dims[1]] = dims[1], dims[0]
                dims = order
            axes = tuple(axes[dim] for dim in dims)
        elif kind == SELECT and selects and len(sizes) == 3 and axes[saved_dim(node)] == (0,):
            axes = axes[: saved_dim(node)] + axes[saved_dim(node) + 1 :]
        elif kind in RESHAPES:
            axes = _regrouped(axes, sizes, shape_of(node))
        elif kind == EXPAND and shape_of(node) == result_shape(*node.next_functions[0]):
            continue  # as matmul does, where there is nothing to expand
        elif kind not in CASTS:
            return None
    return axes


def _regrouped(axes: Axes, sizes: Sequence[int], shape: Sequence[int]) -> Axes | None:
    """The axes after a view with another shape; None if it divides an axis."""
    left = [axis for group in axes for axis in group]
    found: list[tuple[int, ...]] = []
    for length in shape:
        group: list[int] = []
        while prod(sizes[axis] for axis in group) < length and left:
            group.append(left.pop(0))
        if prod(sizes[axis] for axis in group) != length:
            return None
        found.append(tuple(group))
    return None if left else tuple(found)


def selected(place: Place) -> int | None:
    """Which of several matrices the operation uses, as `axes_of` allows it; None if it uses all."""
    return next((saved_index(node) for node in chain_of(place) if kind_of(node) == SELECT), None)


def saved_tensor(place: Place, name: str) -> Tensor:
    """A tensor, or a number as a tensor without axes, that an operation saved for its backward pass."""
    try:
        found: Tensor | float | None = saved(place.node, name)
    except RuntimeError as error:  # it was written to, or is gone; the backward pass says so itself
        raise NotWitnessedError("what an operation saved for its backward pass is not there any more") from error
    if found is None:
        raise NotWitnessedError("an operation saved nothing for its backward pass")
    return found.detach() if isinstance(found, Tensor) else torch.tensor(found, device="cpu")
