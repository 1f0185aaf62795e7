"""The summaries of a session: made at once on the CPU, on their way from a GPU until they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from traindiff.core.kernels import summarize
from traindiff.core.kernels.registry import PUT_OFF, Kernel
from traindiff.core.summary import SUMMARY, Summaries

if TYPE_CHECKING:
    from torch import Tensor

    from traindiff.core.kernels.gpu.rows import DeviceRows, Ticket
    from traindiff.core.shards import Shard


class Deferred:
    """A summary that a GPU is still making."""

    __slots__ = ("_slot", "_ticket")

    def __init__(self) -> None:
        self._ticket: Ticket | None = None
        self._slot = 0

    def arrives_with(self, ticket: Ticket, slot: int) -> None:
        """It is the given row of what the ticket brings."""
        self._ticket, self._slot = ticket, slot

    def result(self) -> np.void:
        """The summary. Waits for the device if it has not come so far."""
        assert self._ticket is not None
        found: np.void = self._ticket.result()[self._slot]
        return found


def resolved(summaries: Sequence[Any]) -> Summaries:
    """Summaries of which some may be `Deferred`, as one array; waits for those. Any thread may call it."""
    return np.array([one.result() if isinstance(one, Deferred) else one for one in summaries], dtype=SUMMARY)


class SummaryStore:
    """Makes the summaries of a session.

    A tensor on a GPU is summarized there, in the order of its stream, and nothing waits for it: what
    `add` gives back is read after `end_step`, as a rule while the next step runs. Where Triton is
    missing, or cannot read a tensor, its elements are copied to the CPU, which waits.

    Args:
        kernels: Those that put summaries off.
    """

    def __init__(self, kernels: Sequence[Kernel] = PUT_OFF) -> None:
        self._kernels = kernels
        self._rows: dict[Any, DeviceRows] = {}
        self._used: set[Any] = set()
        self._waiting: list[tuple[Tensor, Shard, Deferred]] | None = None

    def add(self, tensor: Tensor, shard: Shard) -> np.void | Deferred:
        """The summary of a tensor; see `traindiff.core.kernels.summarize`.

        Raises:
            UnsupportedTensorError: The tensor has no dense elements that could be read.
        """
        rows = self._rows_of(tensor)
        if rows is None:
            return summarize(tensor, shard)
        deferred = Deferred()
        if self._waiting is None:
            deferred.arrives_with(rows.ticket, rows.add(tensor, shard))
        else:
            self._waiting.append((tensor, shard, deferred))
        return deferred

    @contextmanager
    def together(self) -> Iterator[None]:
        """Summarize what is added in the block at its end, all tensors of a dtype in one launch."""
        if self._waiting is not None:
            yield
            return
        self._waiting = []
        try:
            yield
        finally:
            waiting, self._waiting = self._waiting, None
            for device in dict.fromkeys(tensor.device for tensor, _, _ in waiting):
                self._add_many([entry for entry in waiting if entry[0].device == device])

    def end_step(self) -> None:
        """Send what was added on its way to the host. Waits for nothing but what was sent two steps ago."""
        for device in self._used:
            self._rows[device].end_step()
        self._used.clear()

    def _add_many(self, entries: Sequence[tuple[Tensor, Shard, Deferred]]) -> None:
        rows = self._rows[entries[0][0].device]
        slots = rows.add_many([tensor for tensor, _, _ in entries], [shard for _, shard, _ in entries])
        for slot, (_, _, deferred) in zip(slots, entries, strict=True):
            deferred.arrives_with(rows.ticket, slot)

    def _rows_of(self, tensor: Tensor) -> DeviceRows | None:
        """What collects the summaries of its device; None where this one is made at once."""
        device = tensor.device
        for kernel in self._kernels:
            if device.type in kernel.device_types and (module := kernel.load()) is not None and module.reads(tensor):
                if device not in self._rows:
                    self._rows[device] = module.DeviceRows(device)
                self._used.add(device)
                return self._rows[device]
        return None
