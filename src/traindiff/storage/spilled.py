"""Numbers of many ranks, which lie in a temporary file, and take memory only while they are used."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from weakref import WeakSet, ref

import numpy as np

from traindiff.core.summary import SUMMARY, Summaries

_FEW_BYTES = 1 << 27
"""Numbers of a step, over all ranks, that are kept in memory."""

_CHUNK_BYTES = 1 << 28
"""Size of a file. A process may have few files open, and a chunk is freed as a whole."""

_PAUSE = 0.05
"""Seconds after which pages that were used are given back."""


class SpilledNumbers:
    """Makes arrays whose pages are in temporary files, if there are many.

    A thread gives back the memory of pages that were used, as long as there are such arrays. The system reads them
    again, as a rule from its own cache, when they are used again.

    Attributes:
        thread: As above; None if there are no such arrays.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._chunks: WeakSet[mmap.mmap] = WeakSet()  # the arrays keep them
        self._latest: Callable[[], mmap.mmap | None] = lambda: None
        self._used = 0  # bytes of the latest one
        self.thread: threading.Thread | None = None

    def empty(self, rows: int, *, of: int) -> Summaries:
        """An array for summaries, in memory if there are few of them in a step of all ranks.

        Args:
            rows: Length of the array.
            of: Number of summaries that are kept together with these, and of these.
        """
        size = rows * SUMMARY.itemsize
        found = self._in_a_file(rows, size) if size and of * SUMMARY.itemsize > _FEW_BYTES else None
        return np.empty(rows, dtype=SUMMARY) if found is None else found

    def _in_a_file(self, rows: int, size: int) -> Summaries | None:
        """None if there is no place for a file, or if the system does not take pages back."""
        if not hasattr(mmap, "MADV_DONTNEED") or not hasattr(os, "posix_fallocate"):
            return None
        if self._process != os.getpid():  # the files are those of the process that has made this one
            self._begin()
        with self._lock:
            chunk = self._latest()
            if chunk is None or self._used + size > len(chunk):
                if (chunk := _chunk(max(size, _CHUNK_BYTES))) is None:
                    return None
                self._latest, self._used = ref(chunk), 0
                self._chunks.add(chunk)
            found = np.frombuffer(chunk, dtype=SUMMARY, count=rows, offset=self._used)
            self._used += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            if self.thread is None:
                self.thread = threading.Thread(target=self._give_back, name="traindiff-pages", daemon=True)
                self.thread.start()
        return found

    def give_back(self) -> bool:
        """Give back the memory of all pages; False if there are no arrays any more."""
        with self._lock:
            chunks = list(self._chunks)
            if not chunks:
                self.thread = None
            for one in chunks:
                one.madvise(mmap.MADV_DONTNEED)
        return bool(chunks)

    def _give_back(self) -> None:
        """Give back memory, until there are no arrays any more."""
        while self.give_back():
            time.sleep(_PAUSE)


def _chunk(size: int) -> mmap.mmap | None:
    """A file of some bytes, all of which it has; None if there is no place for it."""
    try:
        with tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, size)
            chunk = mmap.mmap(file.fileno(), size)
            chunk.madvise(mmap.MADV_RANDOM)  # else the system maps some megabytes for each row that is asked for
            return chunk
    except OSError:
        return None


SPILLED = SpilledNumbers()
"""Of this process."""
