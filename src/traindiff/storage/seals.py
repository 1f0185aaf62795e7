"""The lines of a file of seals: where each message of a stream is, and its checksum."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import IO, NamedTuple

from traindiff.core.untrusted.demands import damaged

_SEAL = re.compile(rb"(\d{1,18}) (\d{1,18}) ([0-9a-f]{8})\n")
_CUT_SEAL = re.compile(rb"\d{0,18}|\d{1,18} \d{0,18}|\d{1,18} \d{1,18} [0-9a-f]{0,8}")
_MOST_SEAL_BYTES = 48

MOST_TO_SEARCH = 1 << 26
"""Size of a file of seals at most in which a step is searched: two million messages."""


class Seal(NamedTuple):
    """Where a message is, and its checksum."""

    offset: int
    length: int
    checksum: int

    @property
    def end(self) -> int:
        """Where the next message begins."""
        return self.offset + self.length


class Start(NamedTuple):
    """A message to begin with: its number, where the one before it ends, and the place of its seal."""

    number: int
    end: int
    place: int


FIRST = Start(number=0, end=0, place=0)
"""The first message of a stream."""


class SealLines:
    """The lines of a file of seals, each of which is read only if it is asked for.

    Args:
        content: The file.
    """

    def __init__(self, content: bytes) -> None:
        self._lines = content.split(b"\n")[:-1]  # without a line that is cut off

    def __len__(self) -> int:
        return len(self._lines)

    def of(self, number: int) -> Seal | None:
        """The seal of a message; None if its line is damaged."""
        match = _SEAL.fullmatch(self._lines[number] + b"\n")
        return match and _seal(match)

    def start(self, number: int) -> Start:
        """The message, as one to begin with; `FIRST` if its place is not known."""
        before = self.of(number - 1) if 1 < number <= len(self) else None
        if before is None:
            return FIRST
        return Start(number=number, end=before.end, place=sum(len(line) + 1 for line in self._lines[:number]))


def seals_in(file: IO[bytes], start: Start, *, where: str) -> Iterator[Seal | None]:
    """The seals from `start` on, followed by None if the last line of the file was cut off.

    Raises:
        CorruptRecordingError: A line is damaged.
    """
    end = start.end
    file.seek(start.place)
    for number in count(start.number + 1):
        line = file.readline(_MOST_SEAL_BYTES)
        if not line:
            return
        match = _SEAL.fullmatch(line)
        if match and int(match[1]) == end:
            seal = _seal(match)
            end = seal.end
            yield seal
        elif _CUT_SEAL.fullmatch(line) and not file.read(1):
            yield None
            return
        else:
            raise damaged(where, f"line {number} is not a checksum that follows the ones before it")


def _seal(match: re.Match[bytes]) -> Seal:
    return Seal(offset=int(match[1]), length=int(match[2]), checksum=int(match[3], 16))
