"""The sink of MindSpore's taps: makes observations with summaries of NumPy arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.kernels import summarize_array
from traindiff.core.kernels.element_details import Elements, detail_of_elements, is_wanted
from traindiff.core.observation import Merge
from traindiff.core.shards import Shard
from traindiff.core.summary import Detail
from traindiff.errors import UnsupportedTensorError
from traindiff.observe.common.progress import Progress
from traindiff.observe.common.sink import ObservationBuffer, Step

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SMALLEST_NORMAL_OF_BFLOAT16 = 2.0**-126


def read(tensor: Any) -> NDArray[Any]:
    """The elements of a tensor, without a copy, once they are computed. The array must not be kept or written to.

    Raises:
        UnsupportedTensorError: The tensor has no dense elements.
    """
    if not hasattr(tensor, "asnumpy"):
        raise UnsupportedTensorError(f"a {type(tensor).__name__} has no dense elements")
    array: NDArray[Any] = tensor.asnumpy()
    return array


def as_real(array: NDArray[Any]) -> NDArray[Any]:
    """An array of real numbers: complex ones get a last axis of real and imaginary part."""
    if array.dtype.kind != "c":
        return array
    part = np.float32 if array.dtype.itemsize == 8 else np.float64
    return np.ascontiguousarray(array).view(part).reshape(*array.shape, 2)


def elements(array: NDArray[Any]) -> Elements:
    """Values and bits of an array of real numbers. Copies only strided arrays.

    Args:
        array: Any shape; a dtype of NumPy, or bfloat16 as MindSpore registers it.

    Raises:
        UnsupportedTensorError: The dtype is not numeric.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    name, width = flat.dtype.name, flat.dtype.itemsize
    if width not in _UNSIGNED or not (flat.dtype.kind in "biuf" or name == "bfloat16"):
        raise UnsupportedTensorError(f"dtype {name} is not supported")
    bits = flat.view(_UNSIGNED[width])
    if name == "bfloat16":
        values = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return Elements(values=values, bits=bits, tiny=_SMALLEST_NORMAL_OF_BFLOAT16)
    if flat.dtype.kind == "f":
        return Elements(values=flat, bits=bits, tiny=float(np.finfo(flat.dtype).smallest_normal))
    return Elements(values=flat.view(np.uint8) if flat.dtype.kind == "b" else flat, bits=bits, tiny=0.0)


class Observations(ObservationBuffer):
    """Summarizes arrays and keeps the observations until they are written. Any thread may call it.

    Args:
        progress: Where the training is.
        detail: What is kept of a tensor beyond its summary.
        bounds: Bounds of the intervals in which elements of gradients are counted.
        on_full: Called when more waits to be written than should.

    Attributes:
        lock: Held while counters or the waiting observations change. A thread that holds it must not read a tensor:
            the graph that computes the tensor may be waiting for the lock.
    """

    def __init__(
        self, *, progress: Progress, detail: Collection[str], bounds: Sequence[float], on_full: Callable[[], None]
    ) -> None:
        super().__init__(progress, on_full)
        self.lock = threading.RLock()
        self._detail = detail
        self._bounds = bounds

    def emit(
        self,
        array: NDArray[Any],
        *,
        phase: str,
        path: str,
        slot: str,
        stage: str = "",
        call: int = 0,
        optimizer: str | None = None,
        shard: Shard | None = None,
        merge: Merge = "shard",
        weight: float = 1.0,
        factor: float = 1.0,
        late: bool = False,
    ) -> None:
        """Summarize an array, which is neither kept nor changed, and keep the observation.

        The arguments are those of `Sink.emit`. The array has its batch axis in front, if it has one, and was multiplied
        by `factor`; `late` files it under the step that has just ended.
        """
        array = np.asarray(array)
        dtype = array.dtype.name
        shard = shard or Shard.whole(array.shape)
        if array.dtype.kind == "c":
            shard = Shard(shape=(*shard.shape, 2), global_shape=(*shard.global_shape, 2), offset=(*shard.offset, 0))
        summary, detail, unobserved = None, None, ""
        try:
            real = np.asarray(as_real(array), order="C")
            summary = summarize_array(real, shard, partial(elements, real))
            bounds = [bound * factor for bound in self._bounds] if (phase, slot) == ("grad", "grad") else ()
            if is_wanted(real.shape, self._detail, bounds):
                detail = detail_of_elements(
                    elements(real), real.shape, real.dtype.name, self._detail, bounds=bounds, summary=summary
                )
        except UnsupportedTensorError as error:
            unobserved = str(error)
        self._keep_now(
            summary, detail, phase=phase, path=path, slot=slot, stage=stage, call=call, optimizer=optimizer,
            shard=shard, merge=merge, weight=weight, factor=factor, late=late, dtype=dtype, unobserved=unobserved,
        )  # fmt: skip

    def take(self, optimizer: str | None = None) -> Iterator[Step]:
        """Remove and yield the observations of one optimizer, or of all: one item per step."""
        with self.lock:
            yield from list(super().take(optimizer))

    def clear(self) -> None:
        """Drop everything."""
        with self.lock:
            super().clear()

    def _keep_now(self, summary: Any, detail: Detail | None, **about: Any) -> None:
        with self.lock:
            super()._keep_now(summary, detail, term=self.progress.data_rank, **about)
            full = self._is_full
        if full:
            self._on_full()
