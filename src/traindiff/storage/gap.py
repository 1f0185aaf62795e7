"""Why a rank's steps end early, in a file whose space is taken when the recording begins.

A disk that is full takes no new file and no longer one. It does take other bytes in the place of those that are there.
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
"""Characters: of four bytes each they still fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Where a rank's steps end early, and why.

    Attributes:
        reason: Clause without a full stop.
        step: The first step that is missing, of `optimizer`; None where it is not known.
        optimizer: Name of the optimizer; empty where `step` is None.
    """

    reason: str
    step: int | None = None
    optimizer: str = ""

    def message(self, rank: int) -> str:
        """The same in one sentence."""
        if self.step is None:
            return f"rank {rank}: the recording ends early: {self.reason}; the steps that are left are used."
        of = "" if self.optimizer in ("", "optimizer") else f" of {self.optimizer}"
        return f"rank {rank}: step {self.step}{of} could not be written: {self.reason}; all steps before it are used."


def reason_of(error: BaseException) -> str:
    """Why something could not be written, as a clause."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


class ReservedNote:
    """The file of a gap, with its space taken. What is written later replaces blanks.

    Args:
        path: Local path of the file; nothing is there yet.

    Raises:
        OSError: There is no room for it.
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
        """Say why nothing follows. Works on a full disk, and after the file was moved."""
        self._file.seek(0)
        write_all(self._file, dumped(gap).ljust(RESERVED_BYTES))

    def close(self, *, keep: bool) -> None:
        """Close the file, and remove it unless it says something."""
        self._file.close()
        if not keep:
            os.unlink(self._path)  # noqa: PTH108


def dumped(gap: Gap) -> bytes:
    """The file's content, without what fills up its space. At most `RESERVED_BYTES`."""
    optimizer, reason = printable(gap.optimizer)[:_LONGEST_NAME], printable(gap.reason)[:_LONGEST_REASON]
    return manifest.dump({"optimizer": optimizer, "reason": reason, "step": gap.step})


def parsed(data: bytes, *, where: str) -> Gap | None:
    """What a file says; None where nothing was written in its space.

    Raises:
        CorruptRecordingError: It is not what `dumped` gave.
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
