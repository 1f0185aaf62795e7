"""Reorder axes of tensors, and undo it, by permutations that depend on nothing but a seed."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from traindiff.replicas.random_rounding import rounding_key

_MOST = 256
"""Permutations that are kept."""


class Permutations:
    """One permutation per length of an axis: an operation that is repeated is reordered alike.

    Args:
        seed: Another seed gives other permutations. Generators of the training are not drawn from.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: OrderedDict[tuple[int, torch.device], tuple[Tensor, Tensor]] = OrderedDict()

    def shuffled(self, tensor: Tensor, *axes: int) -> Tensor:
        """A copy of `tensor`, reordered along these axes; strides stay (of dense tensors)."""
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
        """The permutation of so many elements and its inverse: int64 [length]."""
        found = self._kept.pop((length, device), None)
        if found is None:
            generator = torch.Generator().manual_seed(rounding_key(self._seed, length) & 0xFFFFFFFF)
            order = torch.randperm(length, generator=generator, device="cpu")
            found = order.to(device), order.argsort().to(device)
        self._kept[length, device] = found  # the latest is the last
        if len(self._kept) > _MOST:
            self._kept.popitem(last=False)
        return found
