"""From what MindSpore's taps hand over to what is written: each array becomes an observation with its summary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.kernels.element_details import Elements, detail_of_elements
from traindiff.core.kernels.reference import summarize_array
from traindiff.core.observation import Merge, Observation
from traindiff.core.shards import Shard
from traindiff.core.summary import Detail
from traindiff.errors import UnsupportedTensorError
from traindiff.observe.common.progress import Progress
from traindiff.observe.common.sink import Pending

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SMALLEST_NORMAL_OF_BFLOAT16 = 2.0**-126


def read(tensor: Any) -> NDArray[Any]:
    """The elements of a tensor where they are, after what computes them; the array must not be kept or written to.

    Raises:
        UnsupportedTensorError: It has no dense elements.
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
    """Values and bits of an array of real numbers. Copies only what is strided.

    Args:
        array: Any shape; of a dtype that NumPy has, or bfloat16 as MindSpore registers it.

    Raises:
        UnsupportedTensorError: Its dtype is no number.
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


class Observations:
    """Summarizes arrays and keeps the observations until they are written. Any thread may call it.

    Args:
        progress: Where the training is.
        detail: What is kept of a tensor beyond its summary.
        bounds: Of the intervals in which the elements of gradients are counted.
        on_full: Called when more waits to be written than should.

    Attributes:
        progress: Where the training is.
        lock: Held while counters or what waits to be written change. Nobody who holds it may read a tensor: a graph
            that computes it may be waiting for the lock.
    """

    def __init__(
        self, *, progress: Progress, detail: Collection[str], bounds: Sequence[float], on_full: Callable[[], None]
    ) -> None:
        self.progress = progress
        self.lock = threading.RLock()
        self._detail = detail
        self._bounds = bounds
        self._on_full = on_full
        self._pending = Pending()

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

        Args:
            array: With the batch axis in front, where there is one.
            phase: See `Observation`; so are the others that it has.
            path: Canonical path.
            slot: Which tensor there.
            stage: Part of the phase.
            call: How often the cell had been called before in the micro-step.
            optimizer: Whose step it belongs to; that of the one that counts where left out.
            shard: Which elements these are; all of them where left out.
            merge: How it merges with others of its site in the step.
            weight: Weight in a mean.
            factor: What the tensor was multiplied by.
            late: File it under the step that has just ended.
        """
        array = np.asarray(array)
        dtype = array.dtype.name
        shard = shard or Shard.whole(array.shape)
        if array.dtype.kind == "c":
            shard = Shard(shape=(*shard.shape, 2), global_shape=(*shard.global_shape, 2), offset=(*shard.offset, 0))
        summary, detail, unobserved = None, None, ""
        try:
            real = as_real(array)
            found = elements(real)
            summary = summarize_array(found.values, found.bits, shard, tiny=found.tiny)
            bounds = [bound * factor for bound in self._bounds] if (phase, slot) == ("grad", "grad") else ()
            detail = detail_of_elements(
                found, real.shape, real.dtype.name, self._detail, bounds=bounds, summary=summary
            )
        except UnsupportedTensorError as error:
            unobserved = str(error)
        self._keep(
            summary, detail, phase=phase, path=path, slot=slot, stage=stage, call=call, optimizer=optimizer,
            shard=shard, merge=merge, weight=weight, factor=factor, late=late, dtype=dtype, unobserved=unobserved,
        )  # fmt: skip

    def unobserved(
        self, reason: str, *, phase: str, path: str, slot: str, stage: str = "", optimizer: str | None = None,
        call: int = 0, late: bool = False,
    ) -> None:  # fmt: skip
        """Record that there is a tensor of which nothing is known. `late`: in the step that has just ended."""
        self._keep(
            None, None, phase=phase, path=path, slot=slot, stage=stage, call=call, optimizer=optimizer, late=late,
            shard=Shard.whole(()), dtype="", unobserved=reason,
        )  # fmt: skip

    def take(self, optimizer: str | None = None) -> Iterator[tuple[list[Observation], list[Any], Mapping[int, Detail]]]:
        """Remove and yield what belongs to one optimizer, or to all of them: one item per step."""
        with self.lock:
            yield from list(self._pending.take(optimizer))

    def clear(self) -> None:
        """Drop everything."""
        with self.lock:
            self._pending.clear()

    def _keep(
        self, summary: Any, detail: Detail | None, *, optimizer: str | None, late: bool = False, **about: Any
    ) -> None:
        progress = self.progress
        with self.lock:
            name = optimizer or progress.optimizer
            seen = Observation(
                step=progress.steps.get(name, 0) - late, micro_step=progress.micro_step, optimizer=name,
                order=progress.next_order(late=late), term=progress.data_rank, **about,
            )  # fmt: skip
            self._pending.append(seen, summary, detail)
            full = self._pending.full
        if full:
            self._on_full()
