"""A rank's stream as objects: the layout on stores that cannot append. FORMAT.md describes it under "Segments".

An object is written at once or not at all. Each holds successive messages of the stream, and their seals behind them.
"""

from __future__ import annotations

import posixpath
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO

from traindiff.core.site import printable
from traindiff.core.untrusted.demands import damaged
from traindiff.core.untrusted.folder import Folder
from traindiff.core.untrusted.ranges import ranged
from traindiff.errors import CorruptRecordingError
from traindiff.storage.location import DATA, SEALS, SEGMENT, segment_name

MOST_SEALS_BYTES = 1 << 26
"""Limit for the seals of all segments of a rank."""

_TRIES = 6
_PAUSE_SECONDS = 0.2
"""Before the second try, and twice as long before each further one: some stores list a new object only later."""


class _MissingFileError(CorruptRecordingError):
    """A file is no longer there."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Segment:
    """An object with messages.

    Attributes:
        first: Offset of its first byte in the stream.
        length: Bytes of the stream that it holds.
        size: Size of the object, with the seals.
    """

    first: int
    length: int
    size: int

    @property
    def end(self) -> int:
        """Offset in the stream behind its last byte."""
        return self.first + self.length

    @property
    def name(self) -> str:
        """Its name in the directory of the rank."""
        return segment_name(self.first, self.length)


def segments_of(sizes: Mapping[str, int]) -> list[Segment]:
    """The segments that make up the stream, in their order.

    A writer joins segments and then removes the joined ones. So several may begin at one place: the longest holds
    the others.

    Args:
        sizes: Size of each file of the directory, by name.
    """
    longest: dict[int, Segment] = {}
    for name, size in sizes.items():
        if match := SEGMENT.fullmatch(name):
            one = Segment(first=int(match[1]), length=int(match[2]), size=size)
            if one.length and (one.first not in longest or longest[one.first].length < one.length):
                longest[one.first] = one
    found: list[Segment] = []
    position = 0
    while position in longest:
        found.append(longest[position])
        position = found[-1].end
    return found


def of_rank(folder: Folder) -> Folder:
    """The directory of a rank, with the stream and its seals as two files, even if they are stored as segments."""
    sizes = folder.sizes()
    if DATA in sizes or SEALS in sizes or not any(map(SEGMENT.fullmatch, sizes)):
        return folder
    return SegmentedFolder(folder)


class SegmentedFolder(Folder):
    """The directory of a rank whose stream is stored as segments, as it was when the size of the stream was asked for.

    A run that still records may replace segments by a longer one meanwhile. Then the list is read again.

    Raises:
        CorruptRecordingError: A segment is missing before others, or has another size than its name says.
    """

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder.file_system, folder.root, refuse=folder.refuse, ahead=folder.ahead)
        self._segments: list[Segment] = []
        self._firsts: list[int] = []
        self._size = 0
        self._seals: bytes | None = None
        self._look_anew()
        self._is_new = True

    def exists(self, name: str) -> bool:
        """As for every folder; the stream and its seals are there."""
        return True if name in (DATA, SEALS) else super().exists(name)

    def size(self, name: str) -> int:
        """As for every folder; of the stream and its seals, over all segments."""
        if name == DATA:
            if not self._is_new:
                self._look_anew()
            self._is_new = False
            return self._size
        return len(self._all_seals()) if name == SEALS else super().size(name)

    def open(self, name: str, *, limit: int | None = None) -> IO[bytes]:
        """As for every folder; the stream and its seals are put together from the segments."""
        if name == DATA:
            return ranged(self._size, self._read, most_ahead=self.most_ahead)
        if name == SEALS:
            seals = self._all_seals()
            return ranged(len(seals), lambda first, count: seals[first : first + count])
        return super().open(name, limit=limit)

    def _look_anew(self) -> None:
        """Read the list of segments, of a stream that may have grown."""
        before = self._size
        self._look()
        self._size = self._segments[-1].end if self._segments else 0
        if self._size != before:
            self._seals = None

    def _look(self) -> None:
        """Read the list of segments, for the stream as it was."""
        for tries in range(_TRIES):
            sizes = self.sizes()
            self._segments = segments_of(sizes)
            end = self._segments[-1].end if self._segments else 0
            firsts = [int(match[1]) for match in map(SEGMENT.fullmatch, sizes) if match]
            behind = min((first for first in firsts if first > end), default=max(end, self._size))
            if behind == end:
                break
            if tries == _TRIES - 1:  # and not only a list that was read while segments were joined
                raise CorruptRecordingError(
                    f"{printable(self.root)} lacks bytes {end} to {behind} of the stream: a segment is missing. "
                    "Restore it from where the recording was copied, or record again."
                )
            time.sleep(_PAUSE_SECONDS * 2**tries)
        self._firsts = [one.first for one in self._segments]
        for one in self._segments:
            if one.size <= one.length:
                what = f"it has {one.size} bytes; its name says {one.length} of the stream, and seals follow them"
                raise damaged(self.path(one.name), what)

    def _read(self, first: int, count: int) -> bytes:
        """Bytes of the stream."""
        found = bytearray()
        while len(found) < count and first + len(found) < self._size:
            found += self._looking_again(partial(self._part, first + len(found), count - len(found)))
        return bytes(found)

    def _part(self, at: int, count: int) -> bytes:
        """Bytes of one segment."""
        one = self._segments[bisect_right(self._firsts, at) - 1]
        part = self.read_range(one.name, at - one.first, min(count, one.end - at))
        if not len(part):
            raise damaged(self.path(one.name), "it is shorter than it was")
        return part.tobytes()

    def _all_seals(self) -> bytes:
        """The seals of all messages up to the end of the stream as it was."""
        if self._seals is None:
            seals = self._looking_again(self._read_seals)
            if self._segments and self._segments[-1].end > self._size:  # joined with later ones meanwhile
                seals = b"".join(line for line in seals.splitlines(keepends=True) if _offset(line) < self._size)
            self._seals = seals
        return self._seals

    def _read_seals(self) -> bytes:
        total = sum(one.size - one.length for one in self._segments)
        if total > MOST_SEALS_BYTES:
            raise damaged(self.root, f"its segments have {total} bytes of seals, and may have {MOST_SEALS_BYTES}")
        return b"".join(self.read_ranges([(one.name, one.length, one.size - one.length) for one in self._segments]))

    def _looking_again(self, read: Callable[[], bytes]) -> bytes:
        """What a function reads, called again with a new list if a segment is gone."""
        for _ in range(_TRIES - 1):
            try:
                return read()
            except _MissingFileError:  # joined with others since
                self._look()
        try:
            return read()
        except _MissingFileError as error:
            raise CorruptRecordingError(str(error)) from None

    def _about(self, path: str) -> int:
        """As for every file, but without a request for a segment that the list has."""
        match = SEGMENT.fullmatch(posixpath.basename(path))
        if match is None:
            return super()._about(path)
        return int(match[2]) + MOST_SEALS_BYTES

    def _missing(self, path: str) -> Exception:
        return _MissingFileError(str(super()._missing(path)))


def _offset(seal: bytes) -> int:
    """The offset in a line of seals; 0 for a damaged line, which a reader will refuse."""
    offset = seal.partition(b" ")[0]
    return int(offset) if offset.isdigit() else 0
