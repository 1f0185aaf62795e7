"""A disk that fills up, without filling one."""

from __future__ import annotations

import errno
from typing import IO


class FullDisk:
    """A file with room for so many bytes; afterwards there is room again, as when somebody cleans up."""

    def __init__(self, file: IO[bytes], room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes) -> None:
        if len(data) > self._room:
            self._file.write(data[: self._room])
            self._file.flush()
            self._room = 10**9
            raise OSError(errno.ENOSPC, "No space left on device")
        self._room -= len(data)
        self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed
