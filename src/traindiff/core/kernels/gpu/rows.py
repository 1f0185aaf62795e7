"""The summaries of a step on a device, from its tensors to the host, without waiting for the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from traindiff.core.kernels.gpu import launch
from traindiff.core.kernels.gpu.layout import DTYPES, WORDS, merging
from traindiff.core.kernels.gpu.plan import ELEMENTS_PER_PART
from traindiff.core.kernels.gpu.table import Placed, Table, in_order, pieces, placed, reads, to_device
from traindiff.core.kernels.reference import BLOCK, LANE_WEIGHTS
from traindiff.core.kernels.torch_arrays import address
from traindiff.core.shards import Shard
from traindiff.core.summary import SUMMARY, Summaries
from traindiff.core.torch_compat.cuda import beside_captures, stream_number


def with_index(device: torch.device) -> torch.device:
    """A GPU with its number: `cuda` alone is the current one."""
    return torch.device(device.type, torch.cuda.current_device()) if device.index is None else device


class StreamOrder:
    """Makes a device current, and makes its current stream wait for the stream that was used before.

    Use this context around all code that touches the buffers that all launches share. The host never waits. If there is
    only one stream, no stream waits either. On the CPU, the context does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = with_index(device) if device.type == "cuda" else None
        self._last: Any = None
        self._number: int | None = None  # of that stream; to ask for it takes 0.2 us, for the object 6 us
        self._outer: Any = None

    def __enter__(self) -> None:
        if self._device is None:
            return
        if torch.cuda.current_device() != self._device.index:
            self._outer = torch.cuda.device(self._device)
            self._outer.__enter__()
        number = stream_number(self._device)
        if self._last is not None and number is not None and number == self._number:
            return
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None and stream != self._last:
            stream.wait_stream(self._last)
        self._last, self._number = stream, number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._outer is not None:
            self._outer.__exit__(kind, error, where)
            self._outer = None

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor that is about to be dropped until the current stream has come so far."""
        if self._device is not None:
            tensor.record_stream(torch.cuda.current_stream(self._device))


class Ticket:
    """Gives the summaries of a step. It is made when the step begins, and filled when the step ends.

    Attributes:
        ended: True after the call of `DeviceRows.end_step` for it. Before that, there is no `result`.
    """

    def __init__(self) -> None:
        self.ended = False
        self._host: HostBuffer | None = None
        self._rows = 0
        self._found: Summaries | None = None

    def result(self) -> Summaries:
        """The summaries, dtype `SUMMARY`, shape (slots,), in the order of the slots.

        Waits for the device, if the step's work has not come that far; after another step has
        passed it has. Later calls give the same array.
        """
        assert self.ended, "a step's summaries are read after it has ended"
        if self._found is None:
            assert self._host is not None
            self._found = self._host.read(self._rows)
            self._host = None
        return self._found

    def end(self, rows: torch.Tensor, host: HostBuffer) -> None:
        """Enqueue the copy of the step's rows. For `DeviceRows`."""
        host.fill(rows, self)
        self._host, self._rows = host, len(rows)
        self.ended = True


class HostBuffer:
    """Memory on the host that a step's rows are copied into: pinned, for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._event: Any = torch.cuda.Event() if self._on_gpu else None
        self._memory = torch.empty((0, WORDS), dtype=torch.int64)
        self._reader: Ticket | None = None

    def fill(self, rows: torch.Tensor, reader: Ticket) -> None:
        """Enqueue a copy of `rows`. The ticket that was here before is read first, so that nothing is lost."""
        if self._reader is not None:
            self._reader.result()
        if len(self._memory) < len(rows):
            self._memory = torch.empty((2 * len(rows), WORDS), dtype=torch.int64, pin_memory=self._on_gpu)
        self._memory[: len(rows)].copy_(rows, non_blocking=True)
        if self._on_gpu:
            self._event.record(torch.cuda.current_stream(rows.device))
        self._reader = reader

    def read(self, rows: int) -> Summaries:
        """The rows as summaries, once they have arrived. They are copied: the buffer is free again."""
        if self._on_gpu:
            with beside_captures():  # on the thread that writes
                self._event.synchronize()
        self._reader = None
        return np.array(self._memory[:rows].numpy()).view(SUMMARY).reshape(rows)


__all__ = ["DeviceRows", "reads"]  # `reads` belongs to the interface of a kernel

_TABLES_KEPT = 16


class DeviceRows:
    """Computes the summaries of a step on one device, one row per tensor.

    `add` and `add_many` enqueue kernels on the device's current stream and return slots. `end_step` enqueues one copy
    to the host and returns a ticket; its `result` has the row of every slot. Only `Ticket.result` waits for the device,
    and only if the device has not finished yet. So read tickets one step late. If steps use several streams, each
    stream waits for the work that was added on the one before it.

    Full buffers grow on the device, in the order of its stream. So no data are lost, and nothing waits, except that the
    allocator may ask the driver for memory. Buffers keep the size of the largest step. Do not use this while a CUDA
    graph is captured, or from two threads at once.

    Attributes:
        device: Device of the tensors.
        ticket: The ticket that the step in progress will fill; slots are indices into its result.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        rows: int = 1024,
        partials: int = 16384,
        elements_per_part: int = ELEMENTS_PER_PART,
    ) -> None:
        """Allocate the buffers, of 1,144 bytes a row.

        Args:
            device: A GPU with its index; the CPU, in Triton's interpreter.
            rows: Rows to begin with.
            partials: Rows for the parts of larger tensors. When they are full, they are merged.
            elements_per_part: Elements per program of a launch, about.
        """
        self.device = device
        self.ticket = Ticket()
        self._elements_per_part = elements_per_part
        self._order = StreamOrder(device)
        with self._order:
            self._rows = torch.empty((rows, WORDS), dtype=torch.int64, device=device)
            self._partials = torch.empty((partials, WORDS), dtype=torch.int64, device=device)
            constants = np.concatenate([LANE_WEIGHTS.view(np.int64), merging()])
            self._constants = to_device(constants, device)
        self._num_rows = 0
        self._num_partials = 0
        self._merges: list[tuple[int, int, int]] = []
        self._merges_of_tables: list[NDArray[np.int64]] = []
        self._tables: OrderedDict[object, Table] = OrderedDict()
        self._host, self._next_host = HostBuffer(device), HostBuffer(device)

    def add(self, tensor: torch.Tensor, shard: Shard) -> int:
        """Enqueue the summary of a tensor; returns its slot. One launch.

        Args:
            tensor: A tensor on this device that `table.reads` accepts. As for any kernel, work that
                changes it later belongs on the current stream, or waits for it. A strided one is
                copied.
            shard: Which elements of the global tensor it holds; see `traindiff.core.kernels.summarize`.

        Raises:
            UnsupportedTensorError: Its elements cannot be read; no slot is taken.
        """
        tensor = tensor.detach()
        with self._order:
            tensor = in_order(tensor, shard)
            address(tensor)
            slot = self._reserve_rows(1)
            self._add(tensor, shard, slot)
        return slot

    def add_many(self, tensors: Sequence[torch.Tensor], shards: Sequence[Shard]) -> range:
        """Enqueue the summaries of tensors; returns their slots. One launch per dtype.

        What is known of tensors travels to the device the first time only, and their addresses if one has
        moved. Strided ones are copied, and cost a launch each.

        Raises:
            UnsupportedTensorError: The elements of one cannot be read; no slot is taken.
        """
        tensors = [tensor.detach() for tensor in tensors]
        addresses = np.array([address(tensor) for tensor in tensors], dtype=np.int64)
        known = tuple(placed(tensor, shard) for tensor, shard in zip(tensors, shards, strict=True))
        with self._order:
            table = self._tables.pop(known, None) or self._new_table(known)
            self._tables[known] = table
            first = self._add_table(table, addresses)
            for place, tensor in enumerate(tensors):
                if known[place] is None:
                    self._add(in_order(tensor, shards[place]), shards[place], first + place)
        return range(first, first + len(tensors))

    def table(self, tensors: Sequence[torch.Tensor], shards: Sequence[Shard]) -> Table:
        """A table of tensors for `add_table`, where each has the row of its number; those in it are contiguous."""
        known = [placed(tensor, shard) for tensor, shard in zip(tensors, shards, strict=True)]
        with self._order:
            return Table(known, self.device, self._elements_per_part)

    def add_table(self, table: Table, addresses: NDArray[np.int64]) -> int:
        """Enqueue the summaries of a table's tensors, one launch per dtype; returns the slot of the first row.

        Args:
            table: From `table`.
            addresses: Of the tensors' first elements, int64 (rows,).
        """
        with self._order:
            return self._add_table(table, addresses)

    def end_step(self) -> Ticket:
        """Enqueue the merging and the copy of all rows of the step, and begin the next.

        Waits only for a ticket of two steps ago that nobody has read.
        """
        with self._order:
            self._merge()
            ticket, self.ticket = self.ticket, Ticket()
            ticket.end(self._rows[: self._num_rows], self._host)
        self._host, self._next_host = self._next_host, self._host
        self._num_rows = 0
        return ticket

    def _add(self, tensor: torch.Tensor, shard: Shard, slot: int) -> None:
        planned = pieces(tensor, shard, self._elements_per_part)
        parts = sum(piece.parts for piece in planned)
        row = self._row_address(slot)
        if parts > 1:
            first = self._reserve_partials(parts)
            self._merges.append((slot, first, parts))
            row = self._partial_address(first)
        for piece in planned:
            start = address(tensor) + piece.offset * tensor.element_size()
            launch.launch_one(self.device, DTYPES[tensor.dtype], start, row, self._constants.data_ptr(), piece)
            row += 8 * WORDS * piece.parts

    def _new_table(self, known: Sequence[Placed | None]) -> Table:
        if len(self._tables) >= _TABLES_KEPT:
            self._tables.popitem(last=False)
        return Table(known, self.device, self._elements_per_part)

    def _add_table(self, table: Table, tensors: NDArray[np.int64]) -> int:
        first = self._reserve_rows(len(tensors))
        partial = self._reserve_partials(table.num_partials)
        self._merges_of_tables.append(table.merges + np.array([first, partial, 0]))
        rows, partials = self._row_address(first), self._partial_address(partial)
        addresses = table.addresses(tensors, self._order.keep)
        for group, places in zip(table.groups, addresses, strict=True):
            of_group = (group.table, places, group.programs)
            launch.launch_many(group.dtype, of_group, rows, partials, self._constants.data_ptr(), box=group.box)
        return first

    def _reserve_rows(self, number: int) -> int:
        first = self._num_rows
        self._num_rows += number
        if self._num_rows > len(self._rows):
            larger = torch.empty((2 * self._num_rows, WORDS), dtype=torch.int64, device=self.device)
            larger[:first] = self._rows[:first]
            self._order.keep(self._rows)
            self._rows = larger
        return first

    def _reserve_partials(self, number: int) -> int:
        if self._num_partials + number > len(self._partials):
            self._merge()
        if number > len(self._partials):
            self._order.keep(self._partials)
            self._partials = torch.empty((number, WORDS), dtype=torch.int64, device=self.device)
        first = self._num_partials
        self._num_partials += number
        return first

    def _merge(self) -> None:
        """Enqueue the merging of all partial summaries; their buffer is free again."""
        merges = np.concatenate([np.array(self._merges, dtype=np.int64).reshape(-1, 3), *self._merges_of_tables])
        if len(merges):
            ways = self._constants.data_ptr() + 8 * BLOCK
            launch.launch_merge(to_device(merges, self.device), ways, self._row_address(0), self._partial_address(0))
        self._merges.clear()
        self._merges_of_tables.clear()
        self._num_partials = 0

    def _row_address(self, slot: int) -> int:
        return self._rows.data_ptr() + 8 * WORDS * slot

    def _partial_address(self, place: int) -> int:
        return self._partials.data_ptr() + 8 * WORDS * place
