"""What the gradient of a parameter gives: `aᵀ (dL/dW) b`, from the elements that this rank holds."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from traindiff.core.kernels.projection import projected, summed
from traindiff.core.shards import Piece, Region, Shard
from traindiff.core.witness import CONTRIBUTED, EDITED, PROBES, SIZE
from traindiff.observe.torch.hooks.context import elements
from traindiff.observe.torch.hooks.nested import as_dense
from traindiff.observe.torch.sharding.layout import Layout, kept_here
from traindiff.observe.torch.witness.probes import Extent, Probes, inner_axis


def given_vector(
    probes: Probes, layout: Layout, gradient: Tensor, piece: Piece, *, edited: bool, contributed: bool = False
) -> tuple[Tensor, int] | None:
    """What a piece of a gradient gives.

    Args:
        probes: The signs.
        layout: How tensors lie over ranks.
        gradient: The gradient of the tensor that holds the piece.
        piece: The piece of a parameter.
        edited: The training wrote to the gradient after the backward pass.
        contributed: What backward passes contributed was taken as it is.

    Returns:
        The vector, and the number of its term: that of the first element, so copies on several ranks have the same.
        None if it is not known which elements of the parameter these are.
    """
    if gradient.layout != torch.strided:
        gradient = as_dense(gradient)
        if gradient.layout != torch.strided:
            return None
    gradient = gradient.detach()
    lies: Region | Shard | None = piece.shard
    if piece.shard is None:
        local, lies = kept_here(gradient)
        if lies is None:
            lies = layout.region_of_parameter(local, path=piece.path, phase="grad") or Region.whole(tuple(local.shape))
    else:
        local = elements(gradient, piece.first, piece.shard)
    if isinstance(lies, Shard) and len(lies.offset) == len(lies.global_shape) and len(lies.global_shape) != 1:
        ranges = tuple(((first, length),) for first, length in zip(lies.offset, lies.shape, strict=True))
        lies = Region(shape=lies.global_shape, ranges=ranges)
    assert lies is not None
    found = _of_region(probes, piece.path, local, lies) if isinstance(lies, Region) else _of_range(
        probes, piece.path, local, lies
    )  # fmt: skip
    if found is None:
        return None
    sums, first = found
    return torch.cat([sums, _remarks(edited, contributed, sums.device)]), first


@lru_cache(maxsize=64)
def _remarks(edited: bool, contributed: bool, device: torch.device) -> Tensor:  # noqa: FBT001
    """What a vector holds behind the probes."""
    vector = torch.zeros(SIZE, dtype=torch.float64, device="cpu")
    vector[EDITED], vector[CONTRIBUTED] = float(edited), float(contributed)
    return vector[PROBES:].to(device)


def _of_region(probes: Probes, path: str, local: Tensor, region: Region) -> tuple[Tensor, int] | None:
    extent = Extent.of(region)
    if extent is None:
        return None
    flat = local.reshape(extent.shape)
    total = probed(flat, probes.row_factors(path, extent, local), probes.columns(path, extent, local))
    columns = prod(region.shape[1:])
    first = extent.rows[0][0] * columns + extent.columns[0][0]
    return total, first + (region.term or 0) * prod(region.shape)


def _of_range(probes: Probes, path: str, local: Tensor, shard: Shard) -> tuple[Tensor, int]:
    """Of consecutive elements, in row-major order: filled up with zeros to whole rows."""
    columns = prod(shard.global_shape[1:])
    first, size = shard.offset[0], shard.size
    top, end = first // columns, -(-(first + size) // columns)
    if (first, size) != (top * columns, (end - top) * columns):
        filled = local.new_zeros((end - top) * columns)
        filled[first - top * columns :][:size] = local.reshape(-1)
        local = filled
    extent = Extent(((top, end - top),), ((0, columns),), inner_axis(shard.global_shape))
    rows, signs = probes.row_factors(path, extent, local), probes.columns(path, extent, local)
    return probed(local.reshape(end - top, columns), rows, signs), first


def probed(gradient: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`aᵀ G b` for each probe.

    Args:
        gradient: G, of any floating dtype, with two axes.
        rows: a, float64, shape (rows, PROBES).
        columns: b, shape (PROBES, columns); see `projected`.

    Returns:
        float64, shape (PROBES,).
    """
    return summed(projected(gradient, columns), rows)[:PROBES]
