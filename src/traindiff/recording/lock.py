"""A lock on the stream of a rank that is being recorded; the kernel releases it when the process ends."""

from __future__ import annotations

import os
import weakref
from functools import cache


class RecordingLock:
    """A lock on a file, until `release` or the end of this process; readers do not notice it.

    Args:
        path: Local path of the file.

    Attributes:
        is_held: Whether the lock was got. False where another recording holds it, and where there is no file or the
            file system has no locks.
        is_taken: Whether another recording holds it.
    """

    def __init__(self, path: str) -> None:
        self.is_taken = False
        self.is_held = False
        self._fd = -1
        _LOCKS.add(self)
        try:
            import fcntl  # Windows has none; recordings are compared there, too

            _release_in_forks()
            self._fd = os.open(path, os.O_RDWR)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_held = True
        except BlockingIOError:
            self.is_taken = True
            self.release()
        except (ImportError, OSError):  # no file, or no right to write it; or this system has no locks
            self.release()

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Give the lock back. Later calls do nothing."""
        fd, self._fd = self._fd, -1
        self.is_held = False
        _LOCKS.discard(self)
        if fd >= 0:
            os.close(fd)


_LOCKS: weakref.WeakSet[RecordingLock] = weakref.WeakSet()
"""The locks of this process, for its forks."""


@cache
def _release_in_forks() -> None:
    """Have forks of the process let go of its locks, so that none outlives it in a worker of a data loader."""
    os.register_at_fork(after_in_child=_release_all)


def _release_all() -> None:
    for lock in list(_LOCKS):
        lock.release()
