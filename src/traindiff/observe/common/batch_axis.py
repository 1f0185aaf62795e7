"""Recognize the axis of an activation that runs over the samples of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from traindiff.core.shards import Shard
from traindiff.core.site import ROOT, matches
from traindiff.observe.common.progress import Batch, Progress

if TYPE_CHECKING:
    from torch import Tensor, nn


def batch_first(tensor: Tensor, axis: int) -> Tensor:
    """A view of the tensor with the given axis in front."""
    return tensor.movedim(axis, 0) if axis else tensor


_UNDECLARED = 1 << 30
"""An axis that no tensor has, for sites without a declaration."""


class BatchAxis:
    """Recognizes batch axes and turns tensors into shards of the global batch.

    The first declaration that matches a site names the axis, or None for a tensor without one. Without a declaration,
    axis 0 is the batch axis if its length is the batch size of the root's inputs, or that size times the lengths of the
    axes that follow it in one of them: a batch of sequences flattened to tokens. (This does not hold for a batch of one
    sample, whose tokens may be as many as the positions of a table.) torch's recurrent modules have the batch on axis 1
    of their states, and on axis 0 or 1 of their output, depending on `batch_first`.

    Args:
        declared: Axis by glob over canonical paths, or over path and slot (`lstm output[1][0]`);
            `(root)` applies to the root's inputs, too.
        modules: The model's modules by canonical path; may change while the training runs.
    """

    def __init__(self, declared: Mapping[str, int | None], modules: Mapping[str, nn.Module] | None = None) -> None:
        self._declared = dict(declared)
        self._modules = {} if modules is None else modules
        self._recurrent = () if modules is None else _recurrent()
        self._unused = dict.fromkeys(self._declared)
        self._asked = False

    def of_batch(self, inputs: Iterable[Sequence[int]], *, path: str = "", slot: str = "input") -> Batch | None:
        """The batch in some tensors, usually the root's inputs; None if none of them has axes.

        Args:
            inputs: The shapes of the tensors.
            path: Canonical path of the module that receives them, or of the loader that yields them.
            slot: Slot of all of them.
        """
        axis = self._declared_axis(path, slot, default=0)
        if axis is None:
            return None
        return _batch(axis, tuple(map(tuple, inputs)))

    def split(
        self,
        shape: tuple[int, ...],
        *,
        path: str,
        slot: str,
        site: tuple[str, ...],
        progress: Progress,
        batch: Batch | None = None,
    ) -> tuple[int, Shard]:
        """The batch axis of a tensor, and its place in the global batch.

        Args:
            shape: The shape of an input of the root or an output of a module; the global one if ranks hold parts.
            path: Canonical path.
            slot: The tensor's slot there; declarations are matched to both.
            site: A key that tells this tensor from all others of the micro-step.
            progress: Counts the rows seen at `site` in this step.
            batch: The tensor's batch, if it is not the one on which the root works.

        Returns:
            The batch axis (0 if there is none), and the shard of the tensor with that axis in front.
        """
        self._asked = True
        batch = batch or progress.current_batch
        declared = self._declared_axis(path, slot, default=_UNDECLARED)
        axis = self._usual_axis(path, slot, len(shape)) if declared == _UNDECLARED else declared
        if axis is None or batch is None or not -len(shape) <= axis < len(shape):
            return 0, Shard.whole(shape)
        if declared == _UNDECLARED and shape[axis] not in batch.lengths:
            return 0, Shard.whole(shape)
        lengths = list(shape)
        shape = (lengths.pop(axis), *lengths)
        first, spacing = progress.rows(site, shape[0], samples=max(1, batch.size))
        return axis, Shard.of_batch(shape, first=first, spacing=spacing)

    def axis_of_samples(self, tensor: Tensor, batch: Batch | None, *, path: str, slot: str) -> int | None:
        """The axis of a tensor of the batch that runs over the samples; None if it has none."""
        from traindiff.core.kernels.torch_arrays import shape_of

        shape = shape_of(tensor)
        axis = self._declared_axis(path, slot, default=0)
        if axis is None or batch is None or not -len(shape) <= axis < len(shape):
            return None
        return axis if shape[axis] == batch.size else None

    def _usual_axis(self, path: str, slot: str, dims: int) -> int:
        """The batch axis if none is declared."""
        module: Any = self._modules.get(path) if dims == 3 else None
        if not isinstance(module, self._recurrent):
            return 0
        return 0 if module.batch_first and slot in ("input[0]", "output[0]") else 1

    def _declared_axis(self, path: str, slot: str, *, default: int) -> int | None:
        if not self._declared:
            return default
        site = f"{path or ROOT} {slot}"
        for pattern, axis in self._declared.items():
            if matches(pattern, path) or fnmatchcase(site, pattern.replace("[", "[[]")):
                self._unused.pop(pattern, None)
                return axis
        return default

    @property
    def unused(self) -> tuple[str, ...]:
        """Declarations that have matched no site so far; empty before the first site."""
        return tuple(self._unused) if self._asked else ()


@lru_cache(maxsize=1 << 10)
def _batch(axis: int, inputs: tuple[tuple[int, ...], ...]) -> Batch | None:
    """The batch in tensors of these shapes: the same object for the same shapes, which is quicker to compare."""
    axes = map(list, inputs)
    shapes = [[shape.pop(axis), *shape] for shape in axes if -len(shape) <= axis < len(shape)]
    if not shapes:
        return None
    size = shapes[0][0]
    if size == 1:
        return Batch(size=size, lengths=frozenset({1}))
    products = (prod(shape[:end]) for shape in shapes if shape[0] == size for end in range(1, len(shape) + 1))
    return Batch(size=size, lengths=frozenset(products))


def _recurrent() -> type[Any]:
    """The class of torch's recurrent modules."""
    from torch import nn

    return nn.RNNBase
