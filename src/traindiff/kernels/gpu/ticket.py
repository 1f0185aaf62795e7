"""The summaries of a step, on their way to the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from traindiff.kernels.gpu.layout import WORDS
from traindiff.summary import SUMMARY, Summaries


class Ticket:
    """The summaries of a step: made when it begins, filled when it ends, read whenever.

    Attributes:
        ended: Whether `DeviceRows.end_step` has been called for it. Before, there is no `result`.
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
            self._event.synchronize()
        self._reader = None
        return np.array(self._memory[:rows].numpy()).view(SUMMARY).reshape(rows)
