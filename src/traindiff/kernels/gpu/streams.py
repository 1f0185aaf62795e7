"""Launches in the order of the calls, whatever streams they are made on."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch


class StreamOrder:
    """Makes a device current, and the current stream wait for the one that was used before.

    A context around everything that touches buffers which are shared by all launches. Nothing waits on
    the host, and with one stream nothing waits at all. Does nothing on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._last: Any = None
        self._outer: Any = None

    def __enter__(self) -> None:
        if self._device is None:
            return
        self._outer = torch.cuda.device(self._device)
        self._outer.__enter__()
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None and stream != self._last:
            stream.wait_stream(self._last)
        self._last = stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._outer is not None:
            self._outer.__exit__(kind, error, where)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor that is about to be dropped until the current stream has come so far."""
        if self._device is not None:
            tensor.record_stream(torch.cuda.current_stream(self._device))
