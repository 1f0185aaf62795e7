"""Files that are not kept open, read by ranges: no more than is asked for, and a little beyond."""

from __future__ import annotations

import io
import os
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LEAST_AHEAD = 1 << 16
"""Bytes that the first request after a jump reads beyond what it was asked for."""

MOST_AHEAD = 1 << 23
"""The most that a request reads beyond what it was asked for, where a file is read from front to back."""


class ReadBytes(Protocol):
    """Reads `count` bytes from byte `first` on, all of which exist."""

    def __call__(self, first: int, count: int) -> bytes:
        """The bytes; fewer only if the file was changed."""


class _Ranges(io.RawIOBase):
    """A file whose bytes come from `read_bytes`; requests grow while it is read from front to back."""

    def __init__(self, size: int, read_bytes: ReadBytes, most_ahead: int) -> None:
        self._size = size
        self._most_ahead = most_ahead
        self._read_bytes = read_bytes
        self._position = 0
        self._first = 0
        self._window = b""
        self._ahead = min(LEAST_AHEAD, most_ahead)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        into = memoryview(buffer).cast("B")
        wanted = min(len(into), self._size - self._position)
        if wanted <= 0:
            return 0
        if not self._first <= self._position < self._first + len(self._window):
            self._fetch(wanted)
        start = self._position - self._first
        found = self._window[start : start + wanted]
        into[: len(found)] = found
        self._position += len(found)
        return len(found)

    def _fetch(self, wanted: int) -> None:
        goes_on = self._position == self._first + len(self._window)
        self._ahead = min(2 * self._ahead if goes_on else LEAST_AHEAD, self._most_ahead)
        count = min(wanted + self._ahead, self._size - self._position)
        self._first, self._window = self._position, self._read_bytes(self._position, count)


def ranged(size: int, read_bytes: ReadBytes, *, most_ahead: int = MOST_AHEAD) -> IO[bytes]:
    """A file to read from and to seek in, whose bytes are fetched when they are needed.

    Args:
        size: Its size in bytes.
        read_bytes: Fetches some of them.
        most_ahead: The most bytes that are fetched beyond what is read.
    """
    return cast("IO[bytes]", io.BufferedReader(_Ranges(size, read_bytes, most_ahead)))


def ranged_file(file_system: Any, path: str, size: int, *, most_ahead: int = MOST_AHEAD) -> IO[bytes]:
    """A file of an fsspec file system, as `ranged`."""
    return ranged(
        size, lambda first, count: file_system.cat_file(path, start=first, end=first + count), most_ahead=most_ahead
    )
