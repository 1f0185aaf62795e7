"""Bytes of a file as a stream, for libraries that read one."""

from __future__ import annotations

import io
from typing import Any

from traindiff.state.stored import Bytes

_BUFFER_BYTES = 1 << 16


class _Stream(io.RawIOBase):
    def __init__(self, content: Bytes) -> None:
        self._content = content
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._place, self._content.count)[whence]
        self._place = max(0, start + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._content.count - self._place))
        buffer[:count] = self._content.read(self._place, count).tobytes()
        self._place += count
        return count


def readable(content: Bytes) -> io.BufferedReader:
    """A stream of these bytes."""
    return io.BufferedReader(_Stream(content), _BUFFER_BYTES)
