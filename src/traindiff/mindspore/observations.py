"""From what MindSpore's taps hand over to what is written: each array becomes an observation with its summary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.detail import Detail
from traindiff.errors import UnsupportedTensorError
from traindiff.kernels.element_details import detail_of_elements
from traindiff.kernels.reference import summarise_array
from traindiff.mindspore.arrays import as_real, elements
from traindiff.observation import Merge, Observation
from traindiff.sessions.pending import Pending
from traindiff.shards import Shard
from traindiff.taps.progress import Progress


class Observations:
    """Summarises arrays and keeps the observations until they are written. Any thread may call it.

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
        """Summarise an array, which is neither kept nor changed, and keep the observation.

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
            summary = summarise_array(found.values, found.bits, shard, tiny=found.tiny)
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
