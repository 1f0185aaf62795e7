"""The summaries of a session: those of CPU tensors are ready at once, those of GPU tensors arrive later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.kernels import summarize
from traindiff.core.kernels.registry import AT_ONCE, PUT_OFF, Kernel
from traindiff.core.kernels.rows import ROW_BYTES, Deferred, Rows
from traindiff.errors import UnsupportedTensorError

if TYPE_CHECKING:
    from torch import Tensor

    from traindiff.core.kernels.gpu.rows import DeviceRows
    from traindiff.core.kernels.gpu.table import Table
    from traindiff.core.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTable:
    """What is known of tensors on one device that are summarized there together.

    Attributes:
        device: The device.
        places: Their numbers among all tensors, int64.
        table: What the device knows of them.
    """

    device: Any
    places: NDArray[np.int64]
    table: Table


class SummaryStore:
    """Makes the summaries of a session.

    A tensor on a GPU is summarized there, in the order of its stream, and nothing waits for it: the result of `add` is
    read after `end_step`, usually while the next step runs. If Triton is missing or cannot read a tensor, the elements
    are copied to the CPU, which waits for the device.

    Args:
        kernels: Kernels whose summaries arrive later.
    """

    def __init__(self, kernels: Sequence[Kernel] = PUT_OFF) -> None:
        self._kernels = kernels
        self._device_types = frozenset[str]().union(*(kernel.device_types for kernel in kernels))
        self._shortest = next((found for one in AT_ONCE if (found := one.load()) is not None), None)
        self._rows: dict[Any, DeviceRows] = {}
        self._used: set[Any] = set()
        self._waiting: list[tuple[Tensor, Shard, Deferred]] | None = None

    def add_to(self, rows: Rows, tensor: Tensor, shard: Shard) -> int:
        """Add the summary of a tensor to rows the shortest way.

        Returns:
            The address of its row; 0, and nothing is added, where there is no such way.
        """
        if tensor.device.type not in self._device_types:
            return 0 if self._shortest is None else int(self._shortest.add_to(rows, tensor, shard))
        device_rows = self._rows_of(tensor)
        if device_rows is None:
            return 0
        try:
            return rows.append(self._put_off(device_rows, tensor, shard))
        except UnsupportedTensorError:
            return 0

    def writer(self, tensor: Tensor, shard: Shard) -> Callable[[int, int], None] | None:
        """A function that writes the summary of a tensor that looks like this one, given the addresses of both.

        None where `add_to` takes more than that, as on a GPU.
        """
        found: Callable[[int, int], None] | None = None
        if self._shortest is not None:
            found = self._shortest.writer(tensor, shard)
        return found

    def add(self, tensor: Tensor, shard: Shard) -> np.void | Deferred:
        """The summary of a tensor; see `traindiff.core.kernels.summarize`.

        Raises:
            UnsupportedTensorError: The tensor has no dense elements that could be read.
        """
        rows = self._rows_of(tensor)
        if rows is None:
            return summarize(tensor, shard)
        return self._put_off(rows, tensor, shard)

    def tables(self, tensors: Sequence[Tensor | None], shards: Sequence[Shard]) -> list[DeviceTable]:
        """What is known of the tensors that are summarized where they are, for `add_tables`; one table for each device.

        Args:
            tensors: Tensors, of which others will come that look the same; None where there is none.
            shards: Which elements of the global tensor each holds.
        """
        by_device: dict[Any, dict[int, Tensor]] = {}
        for place, tensor in enumerate(tensors):
            if tensor is not None and tensor.is_contiguous() and self._rows_of(tensor) is not None:
                by_device.setdefault(tensor.device, {})[place] = tensor
        return [
            DeviceTable(
                device=device,
                places=np.array([*held], dtype=np.int64),
                table=self._rows[device].table([*held.values()], [shards[place] for place in held]),
            )
            for device, held in by_device.items()
        ]

    def add_tables(self, tables: Sequence[DeviceTable], addresses: NDArray[np.int64], rows: Rows, first: int) -> None:
        """Have the summaries of tables arrive in rows that were placed.

        Args:
            tables: From `tables`.
            addresses: Of the first element of each tensor, int64.
            rows: The rows.
            first: The address of the first tensor's row.
        """
        for one in tables:
            device_rows = self._rows[one.device]
            self._used.add(one.device)
            slot = device_rows.add_table(one.table, addresses[one.places])
            slots = np.arange(slot, slot + len(one.places))
            rows.arrive_with(device_rows.ticket, slots, first + ROW_BYTES * one.places)

    def _put_off(self, rows: DeviceRows, tensor: Tensor, shard: Shard) -> Deferred:
        deferred = Deferred()
        if self._waiting is None:
            deferred.arrives_with(rows.ticket, rows.add(tensor, shard))
        else:
            self._waiting.append((tensor, shard, deferred))
        return deferred

    @contextmanager
    def together(self) -> Iterator[None]:
        """Summarize all tensors that are added in this block at its end, those of one dtype in one launch."""
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
        """Start copying the summaries of this step to the host. Waits only for the copy of two steps ago."""
        for device in self._used:
            self._rows[device].end_step()
        self._used.clear()

    def _add_many(self, entries: Sequence[tuple[Tensor, Shard, Deferred]]) -> None:
        rows = self._rows[entries[0][0].device]
        slots = rows.add_many([tensor for tensor, _, _ in entries], [shard for _, shard, _ in entries])
        for slot, (_, _, deferred) in zip(slots, entries, strict=True):
            deferred.arrives_with(rows.ticket, slot)

    def _rows_of(self, tensor: Tensor) -> DeviceRows | None:
        """The collector of summaries on the tensor's device; None if the tensor is summarized at once."""
        device = tensor.device
        if device.type not in self._device_types:
            return None
        for kernel in self._kernels:
            if device.type in kernel.device_types and (module := kernel.load()) is not None and module.reads(tensor):
                if device not in self._rows:
                    self._rows[device] = module.DeviceRows(device)
                self._used.add(device)
                return self._rows[device]
        return None
