"""Which axis of an activation runs over the samples of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from torch import Tensor

from traindiff.kernels.torch_arrays import shape_of
from traindiff.shard import Shard
from traindiff.site import matches
from traindiff.taps.progress import Batch, Progress


def batch_first(tensor: Tensor, axis: int) -> Tensor:
    """A view of the tensor with the given axis in front."""
    return tensor.movedim(axis, 0) if axis else tensor


class BatchAxis:
    """Recognises batch axes and turns tensors into shards of the global batch.

    Without a declaration, axis 0 is the batch axis of a tensor whose length there is the batch
    size of the root's inputs, or that size times the lengths of the axes that follow it in one of
    them (a batch of sequences flattened to tokens). Declarations come first: the first pattern
    that matches a path names the axis, or None for a tensor without one.

    Args:
        declared: Axis by glob over canonical paths; `(root)` is also what the root's inputs obey.
    """

    def __init__(self, declared: Mapping[str, int | None]) -> None:
        self._declared = dict(declared)

    def of_batch(self, inputs: Iterable[Tensor]) -> Batch | None:
        """The batch that the root module received; None when it has no tensor with axes."""
        axis = self._axis("")
        if axis is None:
            return None
        axes = (list(shape_of(tensor)) for tensor in inputs)
        shapes = [[shape.pop(axis), *shape] for shape in axes if -len(shape) <= axis < len(shape)]
        if not shapes:
            return None
        size = shapes[0][0]
        products = (prod(shape[:end]) for shape in shapes if shape[0] == size for end in range(1, len(shape) + 1))
        return Batch(size=size, lengths=frozenset(products))

    def split(self, tensor: Tensor, *, path: str, site: tuple[str, ...], progress: Progress) -> tuple[int, Shard]:
        """Which axis of the tensor comes first in its global index, and which rows it holds.

        Args:
            tensor: An input of the root or an output of a module.
            path: Canonical path to which declarations are matched.
            site: What tells this tensor from all others of the micro-step.
            progress: Counts the rows seen at `site` in this step.

        Returns:
            The batch axis (0 where there is none), and the shard of the tensor with it in front.
        """
        axis, batch, shape = self._axis(path), progress.current_batch, shape_of(tensor)
        if axis is None or batch is None or not -len(shape) <= axis < len(shape):
            return 0, Shard.whole(shape)
        if not self._is_declared(path) and shape[axis] not in batch.lengths:
            return 0, Shard.whole(shape)
        shape = tuple(batch_first(tensor, axis).shape)
        return axis, Shard.of_batch(shape, first=progress.first_row(site, shape[0]))

    def _axis(self, path: str) -> int | None:
        for pattern, axis in self._declared.items():
            if matches(pattern, path):
                return axis
        return 0

    def _is_declared(self, path: str) -> bool:
        return any(matches(pattern, path) for pattern in self._declared)
