"""A note that says why a rank's steps end early, in a file whose space is reserved when the recording begins.

A full disk accepts no new file and no longer file. It still accepts other bytes in place of existing ones.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from traindiff.core.site import printable
from traindiff.errors import CorruptRecordingError
from traindiff.storage import manifest
from traindiff.storage.written_files import UnbufferedFile, write_all

GAP_FILE = "gap.json"
RESERVED_BYTES = 4096
_LONGEST_NAME = 200
_LONGEST_REASON = 600
"""Characters; even with four bytes each, they fit into the reserved space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The place where a rank's steps end early, and the reason.

    Attributes:
        reason: Clause without a full stop.
        step: The first step that is missing, of `optimizer`; None if it is not known.
        optimizer: Name of the optimizer; empty if `step` is None.
    """

    reason: str
    step: int | None = None
    optimizer: str = ""

    def message(self, rank: int) -> str:
        """The gap in one sentence."""
        if self.step is None:
            return f"rank {rank}: the recording ends early: {self.reason}; the steps that are left are used."
        of = "" if self.optimizer in ("", "optimizer") else f" of {self.optimizer}"
        return f"rank {rank}: step {self.step}{of} could not be written: {self.reason}; all steps before it are used."


def reason_of(error: BaseException) -> str:
    """The reason why something could not be written, as a clause."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


class ReservedNote:
    """The local file of a gap, whose space is reserved with blanks; a note replaces them later.

    Raises:
        OSError: The disk has no room for it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = UnbufferedFile(path, "xb")
        try:
            write_all(self._file, b" " * RESERVED_BYTES)
        except OSError:
            self._file.close()
            raise

    def write(self, gap: Gap) -> None:
        """Write the note. Works on a full disk, and after the file was moved."""
        content, written = dumped(gap).ljust(RESERVED_BYTES), 0
        while written < len(content):  # in place: it needs no room, and other calls of write() may fail
            written += os.pwrite(self._file.fileno(), content[written:], written)

    def close(self, *, keep: bool) -> None:
        """Close the file, and remove it unless it holds a note to keep."""
        self._file.close()
        if not keep:
            os.unlink(self._path)  # noqa: PTH108


def dumped(gap: Gap) -> bytes:
    """Content of the file without its padding; at most `RESERVED_BYTES`."""
    optimizer, reason = printable(gap.optimizer)[:_LONGEST_NAME], printable(gap.reason)[:_LONGEST_REASON]
    return manifest.dump({"optimizer": optimizer, "reason": reason, "step": gap.step})


def parsed(data: bytes, *, where: str) -> Gap | None:
    """The gap that a file describes; None if it holds only blanks.

    Raises:
        CorruptRecordingError: The file does not hold what `dumped` returned.
    """
    if not data.strip():
        return None
    content = manifest.readable(manifest.load(data[:RESERVED_BYTES], where=where))
    reason, step, optimizer = (content.get(name) for name in ("reason", "step", "optimizer"))
    if not (isinstance(reason, str) and isinstance(optimizer, str) and (step is None or type(step) is int)):
        raise CorruptRecordingError(
            f"{where} is damaged: it does not say which step is missing, and why. "
            "Restore the file from where it was copied, or record again."
        )
    return Gap(reason=reason, step=step, optimizer=optimizer)
